"""A GPU's updates: recorded once a round as a CUDA graph, and replayed."""

from collections.abc import Callable

import torch


def replayed(update: Callable[..., dict], device: torch.device) -> Callable[..., dict]:
    """Python launches an update's kernels far more slowly than a GPU computes them: record and replay it.

    Of the calls with the same arguments the first just runs, so that libraries get ready; the second is
    recorded; the others replay it, with the same tensors and new random numbers, but with Python's own
    numbers (a learning rate, how much there is to sample) as they were: record anew when these change.
    What the update returns must be detached, and its optimizers `capturable`.
    """
    graphs = {}

    def replay(*arguments) -> dict:
        if arguments not in graphs:
            graphs[arguments] = None
            return update(*arguments)
        if graphs[arguments] is None:
            graph = torch.cuda.CUDAGraph()
            # On this GPU, whichever Warp has left current; other threads work on.
            with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                graphs[arguments] = graph, update(*arguments)
        graph, losses = graphs[arguments]
        graph.replay()
        return {name: loss.clone() for name, loss in losses.items()}  # the next replay writes over them

    return replay
