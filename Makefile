# make demo: from nothing to answers. make test: everything CI checks. Both set up what they need.
PYTHON ?= python3
# Extra words for pip, for example an index that holds CPU builds of torch.
PIP_FLAGS ?=
BIN := .venv/bin
SETUP := .venv/.set-up
export TRANSFORMERS_VERBOSITY ?= error
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup weights demo serve test slow lab export readme bench clean
help:
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(SETUP)  ## make .venv with the pinned packages
$(SETUP): constraints.txt pyproject.toml settings.ini
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pico-vllm needs Python 3.11 or newer, this is %d.%d: use make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "setting up .venv (some minutes the first time) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip check
	@touch $@

weights: $(SETUP)  ## show which weights are used, and fetch them
	@$(BIN)/pico-vllm weights

demo: $(SETUP)  ## answer eight prompts at once with the real 0.5B, in a pool too small for all of them, and watch
	@$(BIN)/pico-vllm generate --chat --max-tokens 96 --max-num-seqs 6 --num-blocks 28 --max-num-batched-tokens 128 \
	  "In two sentences: why does an LLM server keep a KV cache?" \
	  "Write a Python function that returns the n-th Fibonacci number." \
	  "Sag in einem Satz, was ein Block im Speicher ist." \
	  "Name the capitals of France, Italy and Japan." \
	  "Summarise in one sentence: A library lends books to many readers at once. It could keep a whole shelf free for each reader, in case one of them should ever want so many books, and most shelves would stand empty. So it hands out single places instead, wherever one is free, writes down in a small list which places belong to whom, and takes them back on the day a reader leaves. When every place is taken and an old reader needs one more, the newest reader has to give all of theirs back, and is let in again as soon as there is room. Nobody loses a book, and no shelf is empty." \
	  "用一句话解释什么是分页。" \
	  "Is 97 a prime number? Answer yes or no." \
	  "Write a haiku about a full memory."

serve: $(SETUP)  ## the OpenAI-compatible server at http://127.0.0.1:8000, with a page to watch it; Ctrl-C ends it
	@$(BIN)/pico-vllm serve

test: $(SETUP)  ## everything CI checks
	@$(BIN)/pico-vllm weights
	@$(BIN)/python tests/run_notebooks.py
	@$(BIN)/python -m pytest -q tests

slow: $(SETUP)  ## the tests that take many minutes: thousands of random schedules, the invariance suite on the real weights
	@$(BIN)/pico-vllm weights
	@$(BIN)/python -m pytest -q tests --slow

lab: $(SETUP)  ## open the notebooks
	@$(BIN)/jupyter lab nbs

export: $(SETUP)  ## notebooks to package, cleaned
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean

readme: $(SETUP)  ## README.md and its images from nbs/index.ipynb
	@$(BIN)/python docs/make_readme.py

bench: $(SETUP)  ## measure again what benchmarks/ holds, on a quiet machine; executes the notebooks in place
	@PICO_VLLM_SAVE=1 $(BIN)/python tests/run_notebooks.py --in-place
	@$(BIN)/nbdev_clean

clean:  ## remove .venv; the weights in the user cache stay
	@rm -rf .venv
