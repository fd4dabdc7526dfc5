"""Runs one of hatch's scripts from nothing but a Python: ``python3 tools/run.py demo``.

It makes the folder ``.hatch`` in this checkout, installs hatch there, and lets hatch install
the packages and what they need. Deleting ``.hatch`` undoes it. This file alone is written
for any Python, so that one that is too old is told so.
"""

import os
import subprocess
import sys

NEEDED = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOME = os.path.join(ROOT, ".hatch")
HATCH = "hatch>=1.18"


def complaint(version):
    """Return what to tell somebody whose Python is too old, or None."""
    if tuple(version[:2]) >= NEEDED:
        return None
    return "Python %d.%d or newer is needed, and this is %d.%d: run this with a newer one, %s" % (
        NEEDED + tuple(version[:2]) + ("such as python3.11 or python3.13",)
    )


def say(text):
    """Print a line at once, as the commands below print on their own."""
    sys.stderr.write("== %s\n" % text)
    sys.stderr.flush()


def python_of(folder):
    """Return the Python of an environment."""
    place = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return os.path.join(folder, *place)


def hatch_python():
    """Return a Python that has hatch, which is installed where it is not yet."""
    folder = os.path.join(HOME, "venv")
    python = python_of(folder)
    done = os.path.join(folder, "ready")
    if not os.path.exists(done):
        say("installing hatch into .hatch/venv (130 MB, half a minute)")
        code = subprocess.call([sys.executable, "-m", "venv", "--clear", folder])
        if code:
            # the line above this one is Python's own, and names the package to install
            return None
        subprocess.check_call(
            [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", HATCH]
        )
        with open(done, "w"):
            pass
    return python


def main(arguments):
    """Run a script of hatch.toml and return its exit code."""
    complained = complaint(sys.version_info)
    if complained:
        sys.stderr.write("error: %s\n" % complained)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write("usage: python3 tools/run.py SCRIPT [ARGUMENT ...]\n")
        return 0 if arguments else 2
    try:
        python = hatch_python()
        if python is None:
            return 3
        environment = dict(os.environ, HATCH_DATA_DIR=HOME)
        if not os.path.isdir(os.path.join(HOME, "env")):
            say(
                "installing torch and what else is needed into .hatch/env: 2.3 GB with torch's CPU "
                "build, 5.5 GB with its CUDA build; one to five minutes"
            )
            # -v lets pip show what it downloads
            create = [python, "-m", "hatch", "-v", "env", "create"]
            if subprocess.call(create, cwd=ROOT, env=environment, stdout=sys.stderr):
                return 3
        return subprocess.call(
            [python, "-m", "hatch", "run"] + list(arguments), cwd=ROOT, env=environment
        )
    except subprocess.CalledProcessError as error:
        sys.stderr.write("error: %s ended with %d\n" % (" ".join(error.cmd), error.returncode))
        return 3
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
