#!/usr/bin/env python3
"""Runs the benchmarks that bench/run.sh built, one after the other: progress, resuming, what fails, who else is on the GPU, and its clocks.
bench/run.sh says what it can be told.

A program is asked for the names of its cases, so that one case that ends it does not take the others along: it is noted as failed, and the
program started again for the rest. In the same way an interrupted run goes on with the cases that it lacks.
"""
import argparse
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
from reporting import page, text
from reporting.results import SPREAD, Results

HERE = os.path.dirname(os.path.abspath(__file__))

# Name: seconds of --quick and of all cases on an H200, as a first guess of the time left; and the cases of --quick.
ROWS = r"x(128|1024|4096|8192|32768)/"
PROGRAMS = {
    "ceilings": (4, 4, ""), "softmax": (8, 25, "^softmax/fp16/49152" + ROWS), "layernorm": (8, 20, "^layernorm(_residual)?/fp16/49152" + ROWS), "rmsnorm": (6, 15, "^rmsnorm/fp16/49152" + ROWS),
    "elementwise": (4, 15, r"(gelu|swiglu)/fp16/16384x|embed_rmsnorm/"), "matmul": (14, 190, r"1x4096x4096/|1x14336x4096/|16x14336x4096/|4096x4096x4096/"),
    "matmul_in_eight": (10, 90, r"(e4m3|int8)/4096x14336x4096/"),
    "decode": (8, 32, r"^decode/fp16/.*x(4096|131072),32/8,dense"), "prefill": (8, 30, r"bf16/d128x16x(512|2048|8192)/"), "step": (4, 12, r"/(1x120|8x1000|512x0)/(read|kernels)"),
    "sampling": (5, 12, r"fp32/\d+x128256/"),
    "router": (4, 8, r"/(1|1024)x"), "norm_heads": (4, 6, r"/(1|1024)x"), "host_cost": (5, 8, ""),
    "peers": (40, 220, None), "attention_peers": (20, 90, None), "sampling_peers": (15, 40, None)}
SCRIPTS = [name for name, (*_, cases) in PROGRAMS.items() if cases is None]
# Of each peer its modules, of which any one will do.
PACKAGES = {"PyTorch": ["torch"], "Triton": ["triton"], "FlashInfer": ["flashinfer"], "flash-attn": ["flash_attn"],
            "FlashAttention-3": ["flash_attn_interface", "fa3_fwd_interface"], "Liger": ["liger_kernel"], "quack": ["quack"]}
BUDGET = {True: 175, False: 1180}  # seconds of measuring, quick and full: what is not done then is left out and said
SILENCE = 240                      # seconds without a word after which a program hangs
DEATHS = 5                         # cases that may end a program
REASONS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, in hardware", 0x80: "power brake"}


def say(*words):
    print("==", *words, flush=True)


class Busy(Exception):
    pass


class OutOfTime(Exception):
    pass


def ask_gpu(*query):
    result = subprocess.run(["nvidia-smi", "-i", "0", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return [line for line in result.stdout.splitlines() if line.strip()]


def must_be_idle(patience=10):
    """What ran a moment ago still shows for some seconds."""
    end = time.monotonic() + patience
    while True:
        others = ask_gpu("--query-compute-apps=pid,name,used_memory")
        load = ask_gpu("--query-gpu=utilization.gpu")
        percent = int(load[0]) if load and load[0].strip().isdigit() else 0
        if not others and percent <= 5:
            return
        if time.monotonic() > end:
            raise Busy("; ".join(["process " + other + " MiB" for other in others] or [f"it is in use at {percent} %"]))
        time.sleep(min(1, patience / 4))


class Clocks:
    """What nvidia-smi says five times a second while a program runs."""

    def __enter__(self):
        self.process, self.lines = None, []
        try:
            # Drivers have called the reasons by two names.
            known = lambda fact: subprocess.run(["nvidia-smi", "-i", "0", f"--query-gpu={fact}", "--format=csv"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
            reasons = next((fact for fact in ("clocks_event_reasons.active", "clocks_throttle_reasons.active") if known(fact)), "index")
            query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu," + reasons
            self.process = subprocess.Popen(["nvidia-smi", "-i", "0", query, "--format=csv,noheader,nounits", "-lms", "200"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
            self.reader.start()
        except OSError:
            self.process = None
        return self

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.reader.join()

    def summary(self):
        samples = []
        for line in self.lines:
            try:
                sm, mem, watts, heat, reasons = [cell.strip() for cell in line.split(",")]
                samples.append((int(sm), int(mem), float(watts), int(heat), int(reasons, 16)))
            except ValueError:
                continue
        if not samples:
            return None
        sm = [sample[0] for sample in samples]
        held = [name for bit, name in REASONS.items() if any(sample[4] & bit for sample in samples)]
        return (f"sm {statistics.median(sm):.0f} ({min(sm)} to {max(sm)}) MHz, mem {samples[-1][1]} MHz, up to {max(s[2] for s in samples):.0f} W and {max(s[3] for s in samples)} C, "
                f"{len(samples)} samples" + (f", held back by {' and '.join(held)}" if held else ""))


def salvaged(path):
    """The context and the rows of a file that its program may not have ended."""
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read()
    except OSError:
        return {}, []
    for end in [None] + [match.end() for match in reversed(list(re.finditer(r"\n    \}", content)))]:
        try:
            data = json.loads(content if end is None else content[:end] + "]}")
            return data.get("context", {}), data.get("benchmarks", [])
        except json.JSONDecodeError:
            continue
    return {}, []


def exactly(names):
    """A filter of Google Benchmark that takes just these."""
    return "^(" + "|".join(re.sub(r"([.^$*+?()[\]{}|\\])", r"\\\1", name) for name in names) + ")$"


def write(path, data):
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


class Suite:
    def __init__(self, given):
        self.given, self.failed, self.absent = given, [], []
        # Only the programs in C++ know their cases by name.
        self.wanted = [name for name in PROGRAMS if name == "ceilings" or (name in given.names if given.names else not (given.filter and name in SCRIPTS))]
        self.state_path = os.path.join(given.out, ".unfinished.json")
        self.key = {"quick": given.quick, "filter": given.filter, "names": self.wanted, "version": given.version}
        self.state = {"key": self.key, "done": [], "seconds": 0.0}
        self.begin, self.expected_done, self.shown = time.monotonic(), 0.0, -1e9

    # ---- time and progress ----

    def expected(self, name):
        return PROGRAMS[name][0 if self.given.quick else 1]

    def spent(self):
        return self.state["seconds"] + time.monotonic() - self.begin

    def left(self, name=None, share=0.0):
        """The guess for what is ahead, at the pace until now."""
        done = self.expected_done + (self.expected(name) * share if name else 0)
        pace = min(3.0, max(0.3, (time.monotonic() - self.begin) / done)) if done >= 10 else 1.0
        ahead = sum(self.expected(other) for other in self.wanted if other not in self.state["done"])
        return max(0.0, pace * (ahead - (self.expected(name) * share if name else 0)))

    def progress(self, name, count, total):
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if now - self.shown < (0.2 if terminal else 20):
            return
        self.shown = now
        at = self.wanted.index(name) + 1
        line = f"[{at}/{len(self.wanted)}] {name}: {count} of {total} cases; {clock(self.spent())} gone, about {clock(self.left(name, count / max(1, total)))} left"
        print(("\r\033[K" if terminal else "== ") + line, end="" if terminal else "\n", flush=True)

    def save(self):
        write(self.state_path, {**self.state, "seconds": self.spent()})

    # ---- one program ----

    def start(self, command, log, each_line):
        """Runs a command until it ends, is silent for too long, or the time is over. Returns its exit status and the last line it said."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=os.path.dirname(HERE))
        heard, last = [time.monotonic()], [""]

        def listen():
            with open(log, "a", encoding="utf-8") as file:
                for line in process.stdout:
                    heard[0] = time.monotonic()
                    file.write(line)
                    if line.strip():
                        last[0] = line.strip()
                    each_line(line)

        reader = threading.Thread(target=listen, daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                time.sleep(0.02)
                if self.spent() > self.given.budget:
                    raise OutOfTime
                if time.monotonic() - heard[0] > SILENCE:
                    process.kill()
                    last[0] = f"silent for {SILENCE} seconds"
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
            reader.join(5)
        return process.returncode, last[0]

    def cases_of(self, name, command):
        listed = subprocess.run(command + ["--benchmark_list_tests=true"], capture_output=True, text=True, cwd=os.path.dirname(HERE))
        if listed.returncode != 0:
            raise RuntimeError((listed.stderr.strip().splitlines() or [f"exit status {listed.returncode}"])[-1])
        patterns = [pattern for pattern in (PROGRAMS[name][2] if self.given.quick else "", self.given.filter if name != "ceilings" else "") if pattern]
        names = [line for line in listed.stdout.splitlines() if "/" in line]
        return names, [case for case in names if all(re.search(pattern, case) for pattern in patterns)]

    def program(self, name):
        command = [os.path.join(self.given.build, "bench", "bench_" + name)]
        if not os.access(command[0], os.X_OK):
            self.failed.append(f"{name}, which does not build ({os.path.join(self.given.build, 'build.log')})")
            return
        keep = os.path.join(self.given.build, f"{name}.partial.json")
        out, log = os.path.join(self.given.build, f"{name}.json"), os.path.join(self.given.build, f"{name}.log")
        every, cases = self.cases_of(name, command)
        if not cases:
            return
        context, rows = salvaged(keep) if self.resumed else ({}, [])
        rows = {row["name"]: row for row in rows if row["name"] in cases}
        if rows:
            say(f"{name} goes on after {len(rows)} of {len(cases)} cases")
        else:
            open(log, "w").close()
        deaths, over = 0, []

        def measure(names):
            counted = [len(cases) - len(names)]

            def each_line(line):
                if "/iterations:" in line:
                    counted[0] += 1
                    self.progress(name, counted[0], len(cases))
            if os.path.exists(out):
                os.remove(out)
            chosen = [] if len(names) == len(every) else ["--benchmark_filter=" + exactly(names)]
            try:
                return self.start(command + chosen + [f"--benchmark_out={out}", "--benchmark_out_format=json"], log, each_line)
            except OutOfTime:
                over.append(True)
                return 0, ""
            finally:
                found, measured = salvaged(out)
                context.update(found)
                for row in measured:
                    old = rows.get(row["name"])
                    if old is None or row.get("spread", 0) <= old.get("spread", 0):
                        rows[row["name"]] = row
                write(keep, {"context": context, "benchmarks": list(rows.values())})

        with Clocks() as clocks:
            while True:
                missing = [case for case in cases if case not in rows]
                if not missing:
                    break
                status, last = measure(missing)
                missing = [case for case in missing if case not in rows]
                if not missing or over:
                    break
                deaths += 1
                error = f"the program ended with {status}: {last}"[:300] if status else "the program does not report it"
                for case in missing if deaths >= DEATHS or not status else missing[:1]:
                    rows[case] = {"name": case, "run_type": "iteration", "error_occurred": True, "error_message": error, "time_unit": "us"}
            cases = [case for case in cases if case in rows]
            unsteady = [case for case in cases if rows[case].get("spread", 0) > SPREAD]
            if unsteady and not over:
                say(f"{name}: {len(unsteady)} cases spread by more than {SPREAD:.0%} and are measured again")
                measure(unsteady)
        unsteady = [case for case in cases if rows[case].get("spread", 0) > SPREAD]
        wrong = [case for case in cases if rows[case].get("error_occurred")]
        if unsteady:
            self.failed.append(f"{name}: {len(unsteady)} of {len(cases)} cases, still unsteady: {', '.join(map(short, unsteady[:3]))}{' ...' if len(unsteady) > 3 else ''}")
        if wrong:
            self.failed.append(f"{name}: {len(wrong)} of {len(cases)} cases, which fail ({log}): {', '.join(map(short, wrong[:3]))}{' ...' if len(wrong) > 3 else ''}")
        self.finish(name, {"context": context, "benchmarks": [rows[case] for case in cases]}, clocks)
        os.remove(keep)
        if over:
            raise OutOfTime

    def script(self, name):
        out, log = os.path.join(self.given.build, f"{name}.json"), os.path.join(self.given.build, f"{name}.log")
        command = [sys.executable, os.path.join(HERE, name + ".py"), "--out", out] + (["--quick"] if self.given.quick else [])
        library = os.path.join(self.given.build, "bench", "libattention_calls.so")
        if name == "attention_peers":
            if os.path.exists(library):
                command += ["--library", library]
            else:
                self.failed.append(f"attention_calls, which does not build ({os.path.join(self.given.build, 'build.log')}): peers are not measured in turns with it")
        if name == "peers":
            command += ["--budget", str(round(min(0.8 * self.expected(name), max(1, self.given.budget - self.spent()))))]
        for path in (out, log):
            if os.path.exists(path):
                os.remove(path)
        said = len(self.absent)

        def each_line(line):
            if "is not installed" in line:
                self.absent.append(line.strip())

        status, last = 0, ""
        clocks = Clocks()
        try:
            with clocks:
                status, last = self.start(command, log, each_line)
        finally:
            context, rows = salvaged(out)
            if rows:
                self.finish(name, {"context": context, "benchmarks": rows}, clocks)
        if status == 77:
            if len(self.absent) == said:
                self.absent.append(last)
        elif status != 0:
            self.failed.append(f"{name}, which fails ({log}): {last}")
        wrong = [row["name"] for row in rows if row.get("error_occurred")]
        if wrong:
            self.failed.append(f"{name}: {len(wrong)} of {len(rows)} cases, which fail ({log}): {', '.join(map(short, wrong[:3]))}{' ...' if len(wrong) > 3 else ''}")

    def finish(self, name, data, clocks):
        for fact in ("host_name", "load_avg"):
            data["context"].pop(fact, None)
        data["context"]["command"] = self.given.invoked
        if clocks.summary():
            data["context"]["clocks_during"] = clocks.summary()
        write(os.path.join(self.given.out, name + ".json"), data)

    # ---- all of them ----

    def run(self):
        os.makedirs(self.given.out, exist_ok=True)
        self.resumed = False
        if os.path.exists(self.state_path) and not self.given.fresh:
            with open(self.state_path, encoding="utf-8") as file:
                state = json.load(file)
            if state["key"] == self.key:
                self.state, self.resumed = state, True
                say(f"goes on where it was interrupted: {', '.join(state['done']) or 'nothing'} done (--fresh begins anew)")
        for at, name in enumerate(self.wanted):
            if name in self.state["done"]:
                continue
            must_be_idle(self.given.patience)
            say(f"[{at + 1}/{len(self.wanted)}] {name}; {clock(self.spent())} gone, about {clock(self.left())} left")
            self.shown = time.monotonic()
            try:
                self.script(name) if name in SCRIPTS else self.program(name)
            except OutOfTime:
                self.failed.append(f"{', '.join(self.wanted[at:])}: the {self.given.budget:.0f} seconds are over (--budget)")
                break
            except (RuntimeError, OSError) as error:
                self.failed.append(f"{name}, which fails: {error}")
            self.expected_done += self.expected(name)
            self.state["done"].append(name)
            self.save()
            if sys.stdout.isatty():
                print("\r\033[K", end="")
        if os.path.exists(self.state_path):
            os.remove(self.state_path)


def short(case):
    return case.partition("/iterations:")[0]


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--invoked", default="bench/suite.py")
    parser.add_argument("--version", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--filter", default="")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--patience", type=float, default=10, help="seconds to wait for an idle GPU")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    given.budget = given.budget or BUDGET[given.quick]
    suite = Suite(given)
    if given.dry_run:
        for name in suite.wanted:
            print(f"{name:16} about {clock(suite.expected(name))}" + (f", cases {PROGRAMS[name][2]}" if given.quick and PROGRAMS[name][2] else ""))
        print(f"about {clock(suite.left())} in all, at most {clock(given.budget)}")
        for title, modules in PACKAGES.items():
            print(f"{title}: {'found' if any(map(importlib.util.find_spec, modules)) else 'not installed'}")
        return 0
    try:
        suite.run()
    except Busy as busy:
        suite.save()
        say(f"refused: the GPU is not idle: {busy}. What is measured is kept; the same command goes on.")
        return 3
    except KeyboardInterrupt:
        suite.save()
        say("interrupted. What is measured is kept; the same command goes on.")
        return 130
    try:
        text.report(given.out)
    except (KeyError, ValueError) as error:  # a case without its yardstick, after a filter or a failure
        suite.failed.append(f"the rest of the tables: {error!r}")
    report = os.path.join(given.out, "report.html")
    with open(report, "w", encoding="utf-8") as file:
        file.write(page.page(Results(given.out)))
    say(f"{clock(suite.spent())} of measuring; the page with all of it: {report}")
    for line in dict.fromkeys(suite.absent):
        say("without: " + line)
    for line in suite.failed:
        say("left out: " + line)
    return 1 if suite.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    sys.exit(main())
