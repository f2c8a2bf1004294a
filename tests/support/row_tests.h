// The tests that every row operation on the CPU must pass, whatever it calculates.
#pragma once

#include <thread>

#include "cpu.h"
#include "threads.h"

namespace test {

template <class Op, class S, class D = S>
void every_cols() {
  Tally t;
  for (int64_t cols = 1; cols <= 1100; ++cols) {
    Trial<Op, S, D> trial(Shape{3, cols});
    expect_none(t, trial.run());
  }
  CHECK_TALLY(t);
}

template <class Op, class S, class D = S>
void many_cols() {
  Tally t;
  const k::cpu::Exec cx = on_threads(2);
  for (const int64_t cols : {2049, 4097, 12289, 32769, 65537, 100003, 262151, 1048575}) {
    Trial<Op, S, D> trial(Shape{2, cols, 1, 0, 0, 1});
    expect_none(t, trial.run(cx));
  }
  CHECK_TALLY(t);
}

template <class Op, class S, class D = S>
void awkward() {
  Tally t;
  for (const Shape& shape : awkward_shapes()) {
    Trial<Op, S, D> trial(shape);
    expect_none(t, trial.run());
  }
  CHECK_TALLY(t);
}

// S and D of one size: the results stand where the inputs stood.
template <class Op, class S, class D = S>
void in_place() {
  Tally t;
  for (const int64_t cols : {1, 7, 8, 31, 64, 100, 513, 1024, 4099, 40000}) {
    for (const int64_t shift : {0, 1}) {
      for (const int64_t gap : {0, 5}) {
        Trial<Op, S, D> trial(Shape{5, cols, gap, gap, shift, shift, true});
        expect_none(t, trial.run(on_threads(2)));
      }
    }
  }
  CHECK_TALLY(t);
}

template <class Op, class S>
void row_counts() {
  Tally t;
  for (const int64_t rows : {0, 1, 2, 3, 31, 128, 1000}) {
    for (const int64_t cols : {0, 1, 8, 40, 333}) {
      Trial<Op, S> trial(Shape{rows, cols, 1, 2});
      expect_none(t, trial.run(on_threads(3)));
    }
  }
  for (const int64_t cols : {3, 16}) {
    Trial<Op, S> trial(Shape{65537, cols, 1, 0});
    expect_none(t, trial.run(on_threads(2), /*step*/ 13));
  }
  CHECK_TALLY(t);
}

// Fewer threads than rows and more, and the same bits from all of them.
template <class Op, class S>
void thread_counts() {
  Tally t;
  for (const int64_t rows : {1, 2, 5, 6, 64, 1001}) {
    for (const int64_t cols : {1, 33, 1000, 70001}) {
      if (rows * cols > 1000000) continue;
      std::vector<unsigned char> first;
      for (const int threads : {1, 2, 3, 7}) {
        Trial<Op, S> trial(Shape{rows, cols, 1, 3, 1, 0});
        const std::string problem = trial.run(on_threads(threads), /*step*/ threads == 1 ? 7 : rows);
        t.expect(problem.empty(), "%d threads: %s", threads, problem.c_str());
        if (first.empty()) first = trial.bits();
        t.expect(trial.bits() == first, "%s: %d threads give other bits than one", trial.describe().c_str(), threads);
      }
    }
  }
  CHECK_TALLY(t);
}

// Several calls at once, with threads of their own.
template <class Op, class S>
void concurrent_calls() {
  std::vector<std::string> problems(4);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < problems.size(); ++i) {
    callers.emplace_back([&problems, i] {
      for (int round = 0; round < 5 && problems[i].empty(); ++round) {
        Trial<Op, S> trial(Shape{7, 1000 + int64_t(i) * 6000});
        problems[i] = trial.run(on_threads(3));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  Tally t;
  for (const std::string& problem : problems) expect_none(t, problem);
  CHECK_TALLY(t);
}

// value(row, col, cols) for `rows` rows.
template <class Op, class S, class D = S, class Value>
void special_rows(int64_t rows, Value value) {
  Tally t;
  for (const int64_t cols : {1, 2, 5, 8, 33, 100, 256, 1000, 5001, 40000}) {
    Trial<Op, S, D> trial(Shape{rows, cols});
    expect_none(t, trial.input([&](int64_t r, int64_t c) { return value(r, c, cols); }).run());
  }
  CHECK_TALLY(t);
}

}  // namespace test
