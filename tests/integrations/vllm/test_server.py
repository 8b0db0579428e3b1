"""``vllm serve FOLDER``: right answers, under load too, killed clients, damaged files, a full disk."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import server as servers
import serving
import torch
from byte_tokenizer import byte_tokenizer

openai = pytest.importorskip("openai")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

CLIENTS = 64
SECONDS = {"cpu": 15, "cuda": 300}
# By which the log-probability of a chosen token may fall short of the best one's. In 16 bits a batch changes how sums
# are rounded, so near ties are decided either way: in 157 answers in bfloat16 on a CPU, 0.17 was the most.
TOLERANCE = {"cpu": 2e-4, "cuda": 0.5}
OPTIONS = {"cpu": ["--dtype", "float32", "--enforce-eager"], "cuda": ["--dtype", "bfloat16"]}
MODELS = "base", "first", "second"
# vLLM 0.32 for CPUs puts the last adapter on requests for the base model in a batch with others, in 16 bits too.
TOGETHER = {"cpu": MODELS[1:], "cuda": MODELS}
TEXT = "The server gives each of many clients, at once and one token after another, what it would give it alone."
PROMPTS = [TEXT[n : 4 * n + 5] for n in range(24)]  # of 5 to 74 tokens
LONGEST = 40  # tokens of an answer
KILLED = 2000  # tokens that a client asks for which is killed
EXACTLY = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM is of one device")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in several files, and beside it two adapters."""
    folder = serving.make("llama", tmp_path_factory.mktemp("served"), vocab_size=256, max_position_embeddings=4096)
    serving.load(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    for seed, name in enumerate(MODELS[1:]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(serving.load(folder), config).save_pretrained(folder.parent / name)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    """Calls with a prompt, the name of a model and token ids; gives of each token its log-probability, and by how much
    this falls short of the best."""
    first, second = MODELS[1:]
    model = peft.PeftModel.from_pretrained(serving.load(folder), folder.parent / first, adapter_name=first)
    model.load_adapter(folder.parent / second, adapter_name=second)

    @torch.no_grad()
    def scores(prompt: str, name: str, tokens) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([[*prompt.encode(), *tokens]], device=serving.DEVICE)
        model.set_adapter(first if name == "base" else name)
        if name == "base":
            with model.disable_adapter():
                logits = model(ids).logits
        else:
            logits = model(ids).logits
        expected = logits[0, len(prompt) - 1 : -1].cpu().log_softmax(-1)
        own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return own, expected.amax(-1) - own

    return scores


@pytest.fixture(scope="module")
def server(device, folder, tmp_path_factory):
    adapters = [f"{name}={folder.parent / name}" for name in MODELS[1:]]
    lora = ["--enable-lora", "--max-loras", 2, "--max-lora-rank", 8, "--lora-modules", *adapters]
    with servers.started(command(folder, device, *lora), tmp_path_factory.mktemp("log") / "log", ENVIRONMENT) as found:
        yield found


ENVIRONMENT = serving.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def command(folder: Path, device: str, *options) -> list[str]:
    memory = servers.SMALL if device == "cuda" else []
    served = ["--served-model-name", "base", "--max-model-len", 2200]
    return servers.vllm(folder, *served, *OPTIONS[device], *memory, *options)


def client(server) -> openai.AsyncOpenAI:
    """It asks once: a second try would hide a lost answer."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    prompt: str
    model: str
    asked: int  # tokens
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


async def ask(client, prompt: str, model: str, tokens: int, chat: bool, stream: bool) -> Answer:
    """By one of the four ways."""
    create = client.chat.completions.create if chat else client.completions.create
    what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    answer = await create(model=model, max_tokens=tokens, stream=stream, **what, **EXACTLY)
    found, text, reason = [], "", None
    async for choice in choices(answer, stream):
        said = (choice.delta if stream else choice.message).content if chat else choice.text
        found += getattr(choice, "token_ids", None) or []  # the first of a streamed chat names the role alone
        text, reason = text + (said or ""), choice.finish_reason or reason
    return Answer(prompt, model, tokens, tuple(found), text, reason)


async def choices(answer, stream: bool):
    if not stream:
        yield answer.choices[0]
        return
    async for chunk in answer:
        for choice in chunk.choices:
            yield choice


def wrong(answers, reference, tolerance: float) -> list[str]:
    """What is wrong with answers: tokens that the model would not choose, too few or too many, or the same ones as
    different texts."""
    problems, texts, right = [], {}, set()
    for answer in sorted(answers, key=lambda answer: -len(answer.tokens)):  # so that most are beginnings of others
        of, worst = (answer.prompt, answer.model), 0.0
        if answer.tokens and (of, answer.tokens) not in right:
            worst = float(reference(*of, answer.tokens)[1].max())
        if len(answer.tokens) != answer.asked or answer.finish_reason != "length":
            problems.append(f"ended early: {answer}")
        elif not worst <= tolerance:
            problems.append(f"{worst:.3g} below the best token: {answer}")
        elif texts.setdefault(answer.tokens, answer.text) != answer.text:
            problems.append(f"elsewhere it is the text {texts[answer.tokens]!r}: {answer}")
        else:
            right.update((of, answer.tokens[:end]) for end in range(len(answer.tokens) + 1))
    return problems


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_each_way_to_ask(server, reference, device, chat, stream):
    async def all_models():
        async with client(server) as asking:
            return [await ask(asking, PROMPTS[3], model, 24, chat, stream) for model in MODELS]

    answers = asyncio.run(all_models())
    assert not wrong(answers, reference, TOLERANCE[device])
    # An answer of another model, a token too few, another text: each is noticed.
    others = [Answer(**vars(answer) | {"model": MODELS[n - 1]}) for n, answer in enumerate(answers)]
    others += [Answer(**vars(answers[0]) | {"tokens": answers[0].tokens[:-1]})]
    assert len(wrong(others, reference, TOLERANCE[device])) == len(others)
    assert len(wrong([answers[0], Answer(**vars(answers[0]) | {"text": "?"})], reference, TOLERANCE[device])) == 1


def test_log_probabilities(server, reference, device):
    """Of a list of prompts, as token ids."""

    async def several():
        async with client(server) as asking:
            ids = [list(prompt.encode()) for prompt in PROMPTS[:3]]
            return await asking.completions.create(model="base", prompt=ids, max_tokens=24, logprobs=1, **EXACTLY)

    for prompt, choice in zip(PROMPTS, asyncio.run(several()).choices, strict=False):
        own, short = reference(prompt, "base", choice.token_ids)
        assert short.max() <= TOLERANCE[device]
        found = torch.tensor(choice.logprobs.token_logprobs)
        torch.testing.assert_close(found, own, rtol=0, atol=TOLERANCE[device])


# --- load -----------------------------------------------------------------------------------------

# Dies by SIGKILL, without a word to the server, when it has read some of its stream.
KILLED_CLIENT = """
import http.client, os, signal, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=120)
connection.request("POST", "/v1/completions", sys.argv[2], {"Content-Type": "application/json"})
answer = connection.getresponse()
for _ in range(10):
    line = answer.readline()
    assert line.strip() == b"" or b'"choices"' in line, line
os.kill(os.getpid(), signal.SIGKILL)
"""


async def kill_a_client(server) -> None:
    """In the middle of its stream."""
    body = {
        "model": "first",
        "prompt": "?",
        "max_tokens": KILLED,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    arguments = ["-c", KILLED_CLIENT, server.url.rpartition(":")[2], json.dumps(body)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    assert await process.wait() == -signal.SIGKILL


def test_load(server, reference, device):
    """64 clients at once, chats and completions, streamed and not, of several models, while others are killed."""
    seconds = float(os.environ.get("HF_KBIT_LOAD_SECONDS", SECONDS[device]))
    end = time.monotonic() + seconds
    answers, lost, killed = Counter(), Counter(), 0
    generated = server.metric("vllm:generation_tokens_total")

    async def ask_on(asking, seed: int):
        choose = random.Random(seed)
        while time.monotonic() < end:
            ways = choose.random() < 0.5, choose.random() < 0.5
            prompt, model, tokens = choose.choice(PROMPTS), choose.choice(TOGETHER[device]), choose.randint(1, LONGEST)
            try:
                answers[await ask(asking, prompt, model, tokens, *ways)] += 1
            except openai.OpenAIError as error:
                lost[f"{type(error).__name__}: {error}"] += 1

    async def kill_on():
        nonlocal killed
        while time.monotonic() < end:
            await kill_a_client(server)
            killed += 1

    async def everything():
        async with client(server) as asking:
            await asyncio.gather(*(ask_on(asking, seed) for seed in range(CLIENTS)), kill_on())

    asyncio.run(everything())
    assert not lost, lost
    problems = wrong(answers, reference, TOLERANCE[device])
    assert not problems, f"{len(problems)} of {len(answers)} different answers, for one {problems[0]}"
    deadline = time.monotonic() + 30
    while busy := server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, f"{busy} requests are still there"
        time.sleep(0.2)
    # Had nobody told the engine that clients are gone, it would have generated all that they asked for.
    for_killed = server.metric("vllm:generation_tokens_total") - generated
    for_killed -= sum(count * answer.asked for answer, count in answers.items())
    print(f"{answers.total()} answers in {seconds:.0f} s, {len(answers)} different; {killed} clients killed")
    assert killed and 0 < for_killed < killed * KILLED / 2


# --- disks ----------------------------------------------------------------------------------------


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def cut(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def flip(shard: Path, at: int) -> None:
    content = bytearray(shard.read_bytes())
    content[at] ^= 1
    shard.write_bytes(content)


def flip_the_header(shard: Path) -> None:
    flip(shard, 8)


def flip_the_first_tensor(shard: Path) -> None:
    flip(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little"))


def name_another(shard: Path) -> None:
    index = shard.with_name("model.safetensors.index.json")
    index.write_text(index.read_text().replace(shard.name, "model-other.safetensors"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, None),
        (Path.unlink, None),
        (name_another, "model-other.safetensors"),
        (flip_the_header, None),
        (flip_the_first_tensor, None),
    ],
)
def test_a_damaged_shard(damage, named, device, folder, tmp_path):
    """The server ends before it is healthy, and names the file."""
    copy = Path(shutil.copytree(folder, tmp_path / "damaged"))
    assert len(shards(copy)) > 2
    shard = shards(copy)[1]
    damage(shard)
    with servers.starting(command(copy, device), tmp_path / "log", ENVIRONMENT) as server:
        assert not server.wait(200), "it serves a damaged model"
        assert server.process.returncode
        assert (named or shard.name) in server.log.read_text()


@pytest.fixture
def full(tmp_path):
    """A folder on a disk that is full."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted")
    try:
        with pytest.raises(OSError):
            (folder / "all of it").write_bytes(bytes(1 << 20))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


CACHES = "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"


def test_a_full_disk(full, device, folder, reference, tmp_path):
    """Where no cache can be written the server gives right answers, or says why it does not start."""
    environment = ENVIRONMENT | {name: str(full) for name in CACHES}
    with servers.starting(command(folder, device), tmp_path / "log", environment) as server:
        if not server.wait():
            assert "No space left on device" in server.log.read_text(), server.said()
            return

        async def one():
            async with client(server) as asking:
                return await ask(asking, PROMPTS[5], "base", 24, False, True)

        assert not wrong([asyncio.run(one())], reference, TOLERANCE[device])
