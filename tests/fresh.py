"""Runs code in a process that has imported torch and Transformers, which takes seconds, but neither hf_kbit nor PEFT.

One such process waits for code, and runs each piece in a fork of itself: nothing that one does is seen by another.
"""

import json
import os
import subprocess
import sys
import tempfile
import types


class Fresh:
    """The process that waits; ``run`` has code run by it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str) -> str:
        """What the code prints, without white space around it; it must not fail."""
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        status, output, errors = json.loads(self.process.stdout.readline())
        assert status == 0, errors
        return output.strip()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _in_fork(code: str) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                sys.modules["__main__"] = main = types.ModuleType("__main__")
                exec(compile(code, "<fresh>", "exec"), vars(main))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0), errors.seek(0)
        return status, output.read(), errors.read()


if __name__ == "__main__":
    # What takes long to import, once for all that is forked.
    import accelerate  # noqa: F401  as above
    import torch  # noqa: F401  as above
    import transformers.core_model_loading
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401  as above

    assert not {"hf_kbit", "peft"} & sys.modules.keys()
    for line in sys.stdin:
        print(json.dumps(_in_fork(json.loads(line))), flush=True)
