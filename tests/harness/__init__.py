"""What tests stand on: a pool of ranks, programs that are waited for, and the comparisons that all tests make.

``plugin`` teaches pytest the mark ``ranks``, ``pool`` owns the processes, ``worker`` is what runs in each of them,
``report`` puts a failure into words, and ``parity`` compares tensors.

``program`` starts a program, such as the command as a user calls it: ``run(...)`` to its end, or ``Program(...)`` in a
``with`` block, waited for by a line that it prints, a file that it writes, or its end::

    from harness.program import Program, run

    assert run("-m", "shardwise", "--version").stdout.startswith("shardwise ")
    assert "error" in run("-m", "shardwise", "train", "--out", "", exit_code=2).stderr
    with Program("-m", "shardwise", "train", "--data", text, "--out", out, SHARDWISE_CACHE=cache) as program:
        program.wait_for_file(out / "checkpoints/step-00000010")
        program.interrupt()
        program.finish(exit_code=130)

``watchdog`` has the other waits, ``wait_until(happened, what)`` and ``wait_until_ended(*pids)``, and the one limit of
all, WATCHDOG_SECONDS. No test has a limit of its own for what must succeed: a busy machine may be fifty times slower.
``stacks`` asks processes where they stand.

``pretended_gpu`` runs a function where PyTorch believes in a GPU, with what is in ``on_pretended_gpu``: where tensors
lie, what waits for the GPU, what is copied and what is launched, of whole steps at any size.
"""
