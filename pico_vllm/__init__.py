__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "EngineConfig", "SamplingParams", "RequestOutput", "CompletionOutput", "SchedulerService", "create_app"]

_HOME = {"SamplingParams": "sampling", "SchedulerService": "service", "create_app": "server"}  # every other name lives in engine


def __getattr__(name):
    "Load a public name when it is first used, so that `import pico_vllm` and `pico-vllm --help` do not wait for torch."
    if name not in __all__: raise AttributeError(f"module 'pico_vllm' has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f"pico_vllm.{_HOME.get(name, 'engine')}"), name)


def __dir__(): return sorted([*globals(), *__all__])
