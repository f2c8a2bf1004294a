// softmax from one type to every type, in all paths that a row can take.
#pragma once

#include "gpu.cuh"

namespace test {

template <class S, class D>
void softmax_pair() {
  Stream stream;
  Trials<Trial<Softmax, S, D>> trials;
  for (const int64_t cols : {1, 7, 64, 129, 250, 1000, 1024, 2050, 8192, 20001}) {
    trials.add(Shape{6, cols});
    trials.add(Shape{6, cols, 3, 8, 1, 0});
    trials.add(Shape{6, cols, 16, 16, 0, 1});
  }
  for (const int64_t cols : {48, 2096}) {
    if (much_shared_memory()) trials.add(Shape{6, cols}, policy(k::Residency::shared));
    if (much_shared_memory()) trials.add(Shape{6, cols}, policy(k::Residency::shared, 32));
    trials.add(Shape{6, cols}, policy(k::Residency::streamed));
    trials.add(Shape{6, cols}, policy(k::Residency::registers, 320));
  }
  trials.run(stream);
}

template <class S>
void softmax_pairs() {
  SECTION("half") { softmax_pair<S, k::half>(); }
  SECTION("bfloat16") { softmax_pair<S, k::bfloat16>(); }
  SECTION("float") { softmax_pair<S, float>(); }
  SECTION("double") { softmax_pair<S, double>(); }
  SECTION("e4m3") { softmax_pair<S, k::float8_e4m3>(); }
  SECTION("e5m2") { softmax_pair<S, k::float8_e5m2>(); }
}

}  // namespace test
