"""vLLM's oneDNN products on packed weights, for bench_linear: run by the Python that has vLLM.

Each line asks for one measurement, and is answered with {"seconds": [float]}, one a round.

    VENV/bin/python benchmarks/vllm_linear.py NUM_THREADS
"""

import time

from peer_answers import Answer, answer_by_vllm  # it lies beside this file


def make() -> Answer:
    import torch
    import vllm._custom_ops as custom

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def answer(rows: int, columns: int, size: int, dtype: str, number: int, rounds: int) -> dict[str, list[float]]:
        x, w = (torch.randn(count, size).to(getattr(torch, dtype)) for count in (rows, columns))
        handler = custom.create_onednn_mm(w.t())
        custom.onednn_mm(handler, x, None)
        taken = []
        for _ in range(rounds):
            before = clock()
            for _ in range(number):
                custom.onednn_mm(handler, x, None)
            taken.append((clock() - before) / number)
        return {"seconds": taken}

    return answer


if __name__ == "__main__":
    answer_by_vllm(make)
