"""Ctrl-C while texts are asked for and no server answers."""

import textwrap

import pytest

from support.processes import finish, start


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_server_in_one_line():
    """In training, whose own handler lets a step end first: the second one ends at once."""
    program = textwrap.dedent("""
        import os, signal, threading, time, warnings
        from pathlib import Path
        from paceline.engines.contract import Request
        from paceline.core.sampling import SamplingParams
        from paceline.engines.texts import OpenAIWriter
        from paceline.engines import text_servers
        from paceline.train.loop import StopRequest

        waits = threading.Event()  # set by the warning that the server is not there
        warnings.showwarning = lambda *_, **__: waits.set()
        # a process in the background of a shell, and its children, ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def press():
            waits.wait(10)
            for _ in range(2):
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)

        servers = text_servers.TextServers(OpenAIWriter(url="http://127.0.0.1:9"), lambda text: [1])
        threading.Thread(target=press, daemon=True).start()
        try:
            with StopRequest():
                servers.write([Request([1], 2, SamplingParams(), 0)] * 40, lambda *_: None)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    done = finish(start(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
