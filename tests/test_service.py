"""The service where threads meet: aborts, ends and faults in every order. Nobody hangs, and the engine is left empty."""
import asyncio, threading, time

import httpx
import pytest
from conftest import assert_baseline
from serving import GatedModel, engine_of

from pico_vllm.sampling import SamplingParams
from pico_vllm.server import create_app, in_background
from pico_vllm.service import EngineDeadError, RequestAbortedError, SchedulerService, ServiceBusyError, ServiceClosedError

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def run(main):
    "No test may hang."
    async def bounded(): return await asyncio.wait_for(main(), 20)
    return asyncio.run(bounded())


async def whole(stream): return [output async for output in stream][-1].outputs[0]


def test_who_reads_is_told_of_an_abort(fake):
    async def main():
        async with SchedulerService(engine_of(fake.model)) as service:
            stream = await service.submit("x", LONG, "a")
            reader = asyncio.ensure_future(whole(stream))
            await asyncio.sleep(0.01)
            service.abort("a"); service.abort("a"); service.abort("nobody")
            with pytest.raises(RequestAbortedError): await reader
            await service.call(assert_baseline)
    run(main)


def test_an_aborted_id_is_in_use_until_the_engine_knows():
    model = GatedModel()
    async def main():
        async with SchedulerService(engine_of(model)) as service:
            await service.submit("x", LONG, "a")
            while not model.entered.is_set(): await asyncio.sleep(0.001)
            service.abort("a")
            with pytest.raises(ValueError, match="in use"): await service.submit("y", LONG, "a")
            model.gate.set()
            await service.call(lambda engine: None)
            await asyncio.sleep(0)
            second = await whole(await service.submit("y", LONG, "a"))
            assert second.finish_reason == "length" and len(second.token_ids) == 100
    run(main)


@pytest.mark.parametrize("error", [StopIteration("x"), ValueError("x"), SystemExit(1), asyncio.CancelledError()], ids=lambda e: type(e).__name__)
def test_a_call_that_raises_anything(fake, error):
    async def main():
        async with SchedulerService(engine_of(fake.model)) as service:
            def raises(engine): raise error
            with pytest.raises(BaseException) as told: await service.call(raises)
            assert type(told.value) is (RuntimeError if isinstance(error, StopIteration) else type(error))
            assert (await whole(await service.submit("x", LONG))).finish_reason == "length"
    run(main)


def test_a_step_that_raises_anything_is_a_fault():
    class Exits(GatedModel):
        def row(self, tokens): raise SystemExit(3)
    model = Exits()
    model.gate.set()
    async def main():
        async with SchedulerService(engine_of(model)) as service:
            with pytest.raises(EngineDeadError): await whole(await service.submit("x", LONG))
            with pytest.raises(EngineDeadError): await service.call(lambda engine: None)
            with pytest.raises(EngineDeadError): service.check_open()
    run(main)


def test_a_stop_is_told_to_who_waits_for_the_tokenizer(fake):
    async def main():
        service = SchedulerService(engine_of(fake.model))
        await service.start()
        slow = [asyncio.ensure_future(service.in_front(lambda tokenizer: time.sleep(0.1))) for _ in range(3)]
        asking = [asyncio.ensure_future(service.submit("x", LONG)) for _ in range(3)]
        await asyncio.sleep(0.02)
        await asyncio.gather(service.stop(), service.stop())
        results = await asyncio.gather(*slow[1:], *asking, return_exceptions=True)
        assert [type(r) for r in results] == [ServiceClosedError] * 5, results
        with pytest.raises(ServiceClosedError): await service.in_front(len)
        with pytest.raises(ServiceClosedError): await service.start()
        assert_baseline(service.engine)
    run(main)


def test_several_stops_with_calls_behind(fake):
    async def main():
        service = SchedulerService(engine_of(fake.model))
        await service.start()
        answered = asyncio.ensure_future(service.call(lambda engine: time.sleep(0.05)))
        await asyncio.sleep(0.01)
        stops = [asyncio.ensure_future(service.stop()) for _ in range(3)]
        await asyncio.sleep(0)
        late = [asyncio.ensure_future(service.call(lambda engine: None)) for _ in range(3)]
        await asyncio.sleep(0.01)
        late[0].cancel()
        for result in await asyncio.gather(answered, *stops, *late, return_exceptions=True): assert isinstance(result, (type(None), ServiceClosedError, asyncio.CancelledError)), result
        assert service._thread is None and not service._front_open
    for _ in range(20): run(main)


def test_a_full_house_is_told_before_the_tokenizer_is_asked(fake):
    async def main():
        async with SchedulerService(engine_of(fake.model, max_num_seqs=1), max_queue=0) as service:
            first = await service.submit("x", LONG)
            busy = asyncio.ensure_future(service.in_front(lambda tokenizer: time.sleep(1)))
            start = time.perf_counter()
            with pytest.raises(ServiceBusyError): await service.submit(lambda tokenizer: [70], LONG)
            assert time.perf_counter() - start < 0.5
            first.close()
            await busy
    run(main)


def test_seats_of_outputs_that_ended_are_free():
    model = GatedModel(eos_token_ids=(0, 1))
    model.gate.set()
    async def main():
        async with SchedulerService(engine_of(model)) as service:
            stream, taken = await service.submit("x", SamplingParams(n=8, seed=1, temperature=1, max_tokens=100)), []
            async for output in stream:
                taken.append(service.num_unfinished)
                assert service.num_unfinished <= sum(c.finish_reason is None for c in output.outputs) or output.finished
            assert len(set(taken)) > 2, taken
    run(main)


def test_a_service_belongs_to_one_loop(fake):
    service = SchedulerService(engine_of(fake.model))
    async def first():
        await service.start(); await service.start()
        stream = await service.submit("x", LONG)
        await anext(stream)  # and the loop closes, with no stop
    run(first)
    with pytest.raises(RuntimeError, match="another event loop"): run(service.start)
    service._thread.join(10)
    assert not service._thread.is_alive(), "the engine computes for nobody"
    assert_baseline(service.engine)


def test_no_thread_is_left(fake):
    before = set(threading.enumerate())
    with in_background(create_app(SchedulerService(engine_of(fake.model)), ["tiny"])) as url:
        assert httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 200
    end = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < end: time.sleep(0.01)
    assert not left


# The guard

@pytest.fixture(scope="module")
def guarded(fake):
    with in_background(create_app(SchedulerService(engine_of(fake.model)), ["tiny"], allowed_hosts=["127.0.0.1", "[::1]"])) as url: yield url


@pytest.mark.parametrize("host, status", [("127.0.0.1", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 200), ("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403)])
def test_another_host_is_refused(guarded, host, status):
    assert httpx.get(f"{guarded}/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_json_by_its_own_word(guarded, kind):
    response = httpx.post(f"{guarded}/v1/completions", content=b'{"model": "tiny", "prompt": "x"}', headers={"Content-Type": kind} if kind else {})
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


def test_head_and_slashes(guarded):
    assert httpx.head(f"{guarded}/health").status_code == 200
    assert httpx.get(f"{guarded}/health/").status_code == 404  # and no redirect to whatever the Host header says


def test_api_key(fake):
    with pytest.raises(ValueError, match="empty"): create_app(SchedulerService(engine_of(fake.model)), ["tiny"], api_key="")
    with in_background(create_app(SchedulerService(engine_of(fake.model)), ["tiny"], api_key="secret")) as url:
        def status(*values, path="/v1/models"): return httpx.get(url + path, headers=[("Authorization", v) for v in values]).status_code
        assert [status("Bearer secret"), status("bearer secret")] == [200, 200]
        assert {status(), status("Bearer"), status("secret"), status("Basic secret"), status("Bearer secrets"), status("Bearer secret", "Bearer wrong"), status(b"Bearer \xff")} == {401}
        assert {status(path=p) for p in ("//v1/models", "/%761/models", "/openapi.json", "/v1/models/")} == {401}
        assert status(path="/health") == 200
