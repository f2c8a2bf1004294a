// A product that is timed, and what it is compared to.
#pragma once

#include <kernels/matmul.cuh>

#include "blas.cuh"

namespace bench {

inline void must(const kernels::Status& status) {
  if (status) return;
  std::fprintf(stderr, "%s\n", status.reason());
  std::exit(1);
}

// One op at one shape, with rotating sets of weights.
class ProductCase : public CaseBase {
 public:
  // weight_bytes: all that must be read of the weights, scales included.
  ProductCase(const std::string& op, const std::string& type, int64_t m, int64_t n, int64_t kk, double weight_bytes)
      : CaseBase(op, type, std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(kk), weight_bytes,
                 "share_of_read"),
        m_(m),
        n_(n),
        k_(kk) {}

  using CaseBase::buffer;
  // A matrix for each set; words are filled as halves.
  template <class T>
  std::vector<T*> weights(size_t count) {
    std::vector<T*> all;
    for (int i = 0; i < sets_; ++i) {
      if constexpr (std::is_same<T, uint32_t>::value)
        all.push_back(reinterpret_cast<T*>(buffer<kernels::half>(2 * count)));
      else
        all.push_back(buffer<T>(count));
    }
    if (from_.empty()) from_.assign(all.begin(), all.end());
    return all;
  }
  void read() {
    add("read", [this](benchmark::State& state) { report(state, measure_yardstick()); });
  }
  // call(exec, set, policy)
  void kernels(const std::function<kernels::Status(const kernels::Exec&, int, const kernels::MatmulPolicy&)>& call) {
    add("kernels", [this, call](benchmark::State& state) {
      time(state, [=](cudaStream_t s, int i) { must(call(kernels::Exec(s), i, {})); });
    });
    if (m_ > 64) return;
    add("kernels_early", [this, call](benchmark::State& state) {
      time(state, [=](cudaStream_t s, int i) {
        kernels::MatmulPolicy policy;
        policy.weights_ready = true;
        must(call(kernels::Exec(s).programmatic(true).constant_weights(true), i, policy));
      });
    });
  }
  void other(const char* who, const std::function<void(cudaStream_t, int)>& call) {
    add(who, [this, call](benchmark::State& state) { time(state, call); });
  }
  // The fastest of several, which is then measured as the others are: as often, and as long at the power limit.
  void best(const char* who, int count, const std::function<void(cudaStream_t, int, int)>& call) {
    add(who, [this, count, call](benchmark::State& state) {
      double least = HUGE_VAL;
      int fastest = 0;
      for (int c = 0; c < count; ++c) {
        const double us = time_us(
            sets_, [&](cudaStream_t s, int i) { call(s, c, i); }, calls(), 7);
        if (us < least) least = us, fastest = c;
      }
      time(state, [&](cudaStream_t s, int i) { call(s, fastest, i); });
    });
  }

 private:
  static constexpr int64_t kManyTokens = 256;  // with these, the power limit counts
  int calls() const { return 2e-9 * double(m_) * double(n_) * double(k_) > 1e3 ? 4 : 20; }
  void time(benchmark::State& state, const std::function<void(cudaStream_t, int)>& call) {
    report(state, time_us(sets_, call, calls(), 15, m_ >= kManyTokens));
  }
  void report(benchmark::State& state, const Timing& time) const {
    CaseBase::report(state, time);
    if (m_ > 1) state.counters["TFLOP/s"] = 2e-6 * double(m_) * double(n_) * double(k_) / time.us;
  }
  Timing measure_yardstick() const override {
    return read_us(
        sets_, [&](int i) { return from_[size_t(i)]; }, size_t(bytes_));
  }

  int64_t m_, n_, k_;
  std::vector<const void*> from_;
};

inline std::shared_ptr<ProductCase> make_case(const std::string& op, const std::string& type, int64_t m, int64_t n,
                                              int64_t kk, double weight_bytes) {
  return std::make_shared<ProductCase>(op, type, m, n, kk, weight_bytes);
}

}  // namespace bench
