"""The npm `openai` client, unmodified, against our server: one run a week is enough, so it is slow."""
import json, shutil, subprocess

import pytest
from serving import Server, engine_of

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "unused", maxRetries: 0 });
const body = { model: "tiny", messages: [{ role: "user", content: "hi" }], temperature: 0, max_completion_tokens: 8, ignore_eos: true };
const whole = await client.chat.completions.create(body);
let streamed = "", usage = null, reasons = [];
for await (const chunk of await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
  for (const choice of chunk.choices) { streamed += choice.delta.content ?? ""; if (choice.finish_reason) reasons.push(choice.finish_reason); }
  usage = chunk.usage ?? usage;
}
const models = (await client.models.list()).data.map((m) => m.id);
let refused = null;
try { await client.completions.create({ model: "tiny", prompt: "x", temperature: 9, top_p: 2 }); } catch (e) { refused = [e.constructor.name, e.status, e.param]; }
const stream = await client.completions.create({ model: "tiny", prompt: "x", max_tokens: 100, ignore_eos: true, stream: true });
for await (const chunk of stream) break;  // hangs up
console.log(JSON.stringify({ whole: whole.choices[0].message.content, usage: whole.usage, streamed, streamedUsage: usage, reasons, models, refused }));
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not here")
def test_npm_client(fake, tmp_path):
    (tmp_path / "client.mjs").write_text(SCRIPT)
    (tmp_path / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "openai@6.49.0"], cwd=tmp_path, check=True, capture_output=True)
    with Server(engine_of(fake.model)) as server:
        done = subprocess.run(["node", "client.mjs", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        server.baseline()
    said = json.loads(done.stdout)
    assert said["streamed"] == said["whole"] and len(said["whole"]) > 0
    assert said["usage"]["completion_tokens"] == said["streamedUsage"]["completion_tokens"] == 8
    assert said["reasons"] == ["length"] and said["models"] == ["tiny"] and said["refused"] == ["BadRequestError", 400, "top_p"]
