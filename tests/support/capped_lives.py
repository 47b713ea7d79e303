"""python tests/support/capped_lives.py SEED FOLDER: some lives with the same bits, under the caps of the environment.

It prints the name of the numerics. A difference is an error.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from support.same_bits import check_life  # noqa: E402
from support.same_bits_rows import a_life, model_of, pool_of  # noqa: E402

from kvpage.serving.model.native.bits.numerics import numerics_name  # noqa: E402

MODELS = (
    ("llama", torch.float32),
    ("llama", torch.bfloat16),
    ("gpt_oss", torch.bfloat16),
    ("mixtral", torch.float32),
    ("deepseek_v3", torch.float32),
    ("qwen3_next", torch.bfloat16),
)


def main(seed: int, folder: Path) -> None:
    for kind, dtype in MODELS:
        model = model_of(kind, dtype)
        check_life(model, random.Random(seed), folder / f"{kind} {dtype}", num_requests=3)
        a_life(pool_of(model), random.Random(seed), num_calls=2, rows_each=3)
        print(kind, dtype, flush=True)
    print(numerics_name())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
