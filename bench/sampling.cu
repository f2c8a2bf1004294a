// Sampling a token from each row of logits, against a kernel that only reads them. What is timed is named
//   sampling/<type>/<rows>x<vocabulary>/<who>
// who: read, the yardstick; greedy; top_k_top_p, of 50 and 0.9 at temperature 0.8; top_k_penalties, the same with
// repetition penalties for a list of 500 tokens; top_p, of 0.9 at temperature 0.33; plain, without a filter. Logits are
// normal.
#include <kernels/sampling.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

template <class T>
class Case : public bench::CaseBase {
 public:
  Case(int64_t rows, int64_t vocabulary)
      : CaseBase("sampling", bench::type_name<T>, std::to_string(rows) + "x" + std::to_string(vocabulary),
                 double(rows * vocabulary) * sizeof(T), "share_of_read"),
        rows_(rows),
        vocabulary_(vocabulary) {
    for (int i = 0; i < sets_; ++i) logits_.push_back(buffer<T>(size_t(rows * vocabulary)));
    tokens_ = bench::arena().reserve<int32_t>(size_t(rows));
    previous_ = bench::arena().reserve<int32_t>(kPrevious);
    lengths_ = bench::arena().reserve<int32_t>(size_t(rows));
  }
  void start() {
    add("read", [this](benchmark::State& state) { report(state, measure_yardstick()); });
    const k::Sampling few = k::Sampling{}.temperature(0.8f).top_k(50).top_p(0.9f).seed(1);
    mode("greedy", k::Sampling{}.greedy());
    mode("top_k_top_p", few);
    mode("top_k_penalties", k::Sampling(few).previous(previous_, 0, lengths_).repetition_penalty(1.1f));
    mode("top_p", k::Sampling{}.temperature(0.33f).top_p(0.9f).seed(1));
    mode("plain", k::Sampling{}.seed(1));
  }

 private:
  static constexpr int kPrevious = 500;
  bench::Timing measure_yardstick() const override {
    return bench::read_us(sets_, [&](int i) { return logits_[size_t(i)]; }, size_t(bytes_), bench::calls_for(bytes_));
  }
  void mode(const char* who, const k::Sampling& options) {
    add(who, [this, options](benchmark::State& state) {
      std::vector<int32_t> previous = bench::shuffled(size_t(vocabulary_)), lengths(size_t(rows_), kPrevious);
      BENCH_CHECK(cudaMemcpy(previous_, previous.data(), kPrevious * sizeof(int32_t), cudaMemcpyHostToDevice));
      BENCH_CHECK(cudaMemcpy(lengths_, lengths.data(), lengths.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
      const auto run = [&](cudaStream_t stream, int i) {
        const k::Status status = k::sample(stream, k::load(static_cast<const T*>(logits_[size_t(i)]), vocabulary_),
                                           tokens_, rows_, vocabulary_, options);
        if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
      };
      report(state, bench::time_us(sets_, run, bench::calls_for(bytes_)));
    });
  }

  int64_t rows_, vocabulary_;
  std::vector<T*> logits_;
  int32_t *tokens_, *previous_, *lengths_;
};

template <class T>
void sampling(int64_t rows, int64_t vocabulary) {
  std::make_shared<Case<T>>(rows, vocabulary)->start();
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t rows : {1, 8, 64, 256}) sampling<float>(rows, 128256);
  for (const int64_t rows : {1, 64}) sampling<k::bfloat16>(rows, 128256);
  for (const int64_t rows : {1, 64}) sampling<float>(rows, 50257);
  for (const int64_t rows : {1, 64}) sampling<float>(rows, 32000);
  return bench::run(argc, argv, {});
}
