"""``hf-kbit run transformers serve FOLDER`` answers what the model gives, also by continuous batching."""

import asyncio

import pytest
import server as servers
import torch
from byte_tokenizer import byte_tokenizer
from tokenizers import decoders
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_serve_available

from hf_kbit import KbitConfig

openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]"),
]
TEXT = "The server gives each of many clients, at once and one token after another, what it would give it alone."
PROMPTS = [TEXT[n : 4 * n + 5] for n in range(16)]
TOKENS = 24
# By which the log-probability of a chosen token may fall short of the best one's: in 16 bits, near ties are decided
# either way. As tests/integrations/vllm/test_server.py has it.
TOLERANCE = {"cpu": 2e-4, "cuda": 0.5}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
# Without a number of blocks continuous batching takes most of a CPU's memory.
BATCHING = ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512"]


@pytest.fixture(scope="module")
def tokenizer():
    """It writes each token as a letter of its own, so that a text tells which tokens there were."""
    made = byte_tokenizer()
    made.backend_tokenizer.decoder = decoders.Fuse()
    made.eos_token = None
    return made


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"num_hidden_layers": 2, "vocab_size": 256, "initializer_range": 0.2}
    # Without an end of sequence every answer has the same length.
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    folder = tmp_path_factory.mktemp("served")
    LlamaForCausalLM(config).save_pretrained(folder / "dense")
    quantized = KbitConfig(bits=4, embedding_bits=5)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=quantized)
    model.save_pretrained(folder / "packed")
    tokenizer.save_pretrained(folder / "packed")
    return folder / "packed"


async def ask(client, model: str, prompt: str, stream: bool) -> str:
    answer = await client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=stream
    )
    if not stream:
        assert answer.choices[0].finish_reason == "length"
        return answer.choices[0].text
    chunks = [chunk.choices[0] async for chunk in answer]
    assert chunks[-1].finish_reason == "length"
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("options", [[], BATCHING], ids=["one after another", "continuous batching"])
def test_all_at_once(folder, tokenizer, device, options, tmp_path):
    """Streamed and not."""
    command = servers.transformers(folder, "--device", device, "--dtype", DTYPE[device], *options)

    async def everybody(server):
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        async with client:
            asked = [ask(client, str(folder), prompt, stream) for prompt in PROMPTS for stream in (False, True)]
            return await asyncio.gather(*asked)

    with servers.started(command, tmp_path / "log") as server:
        answers = asyncio.run(everybody(server))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, text in zip([prompt for prompt in PROMPTS for _ in range(2)], answers, strict=True):
        tokens = tokenizer.convert_tokens_to_ids(list(text))
        assert len(tokens) == TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.encode(), *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        short = expected.amax(-1) - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert short.max() <= TOLERANCE[device], (prompt, text, short)
