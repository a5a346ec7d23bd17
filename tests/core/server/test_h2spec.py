"""h2spec, the conformance tester for HTTP/2, against this package's server, where the program is present.

It is found as `h2spec` on the PATH, or where the environment variable H2SPEC says.
"""

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

from bridge import serve_gym
from bridge.testing import CountingEnv

PROGRAM = os.environ.get("H2SPEC") or shutil.which("h2spec")
SERVICE = "/dm_env_rpc.v1.Environment/Process"
# Cases that say nothing about a server of this kind.
EXCEPTIONS = {
    "generic/2/2": "waits for DATA, and the answer to an empty gRPC call is trailers alone",
    "generic/2/3": "the same",
    "http2/5.1.2/1": "its streams are answered and ended before they exceed the limit",
    "http2/5.3.1/1": "priorities, which RFC 9113 deprecates",
    "http2/5.3.1/2": "the same",
    "http2/6.3/2": "the stream whose priority it names was ended by the answer",
    "http2/4.2/2": "this server grants frames of 2^24 - 1 bytes, which the program cannot exceed",
    "http2/4.2/3": "the same",
}
# With GET alone, which is answered in full before the frame that they are about; the variant of gRPC tests them.
ANSWERED = ("http2/6.9.1/3", "http2/8.1.2.6/1", "http2/8.1.2.6/2")


def failed_cases(report):
    """Return the numbers of the cases that failed, and of all, from h2spec's JUnit report."""
    failed, cases = {}, set()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for index, case in enumerate(suite.iter("testcase"), 1):
            number = f"{case.get('package')}/{index}"
            cases.add(number)
            failure = case.find("failure") if case.find("failure") is not None else case.find("error")
            if failure is not None:
                failed[number] = f"{case.get('classname')}: {''.join(failure.itertext()).strip()}"
    return failed, cases


@pytest.mark.skipif(not PROGRAM, reason="h2spec is not here: put it on the PATH, or name it by H2SPEC")
@pytest.mark.parametrize("variant", ["get", "grpc"])
def test_every_applicable_case_of_h2spec_passes(tmp_path, variant):
    report = tmp_path / "report.xml"
    with serve_gym(lambda: CountingEnv(5)) as server:
        command = [PROGRAM, "-h", "127.0.0.1", "-p", str(server.port), "-o", "1", "-S", "-j", str(report)]
        if variant == "grpc":
            command += ["-P", SERVICE]
        environment = {**os.environ, **({"H2SPEC_GRPC": "1"} if variant == "grpc" else {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert re.search(r"\d+ tests, \d+ passed", done.stdout), done.stdout + done.stderr
    failed, cases = failed_cases(report)
    assert len(cases) > 140
    allowed = set(EXCEPTIONS) | (set(ANSWERED) if variant == "get" else set())
    assert allowed <= cases, "an exception names a case that there is not"
    wrong = {number: why for number, why in failed.items() if number not in allowed}
    assert not wrong, "\n".join(f"{number} {why}" for number, why in wrong.items())
