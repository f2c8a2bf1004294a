// Attention of one query to each sequence, against a kernel that only reads the keys and values. What is timed is named
//   decode/<type of keys>/<sequences>x<keys>,<heads>/<heads of keys>,<dense or pages of how many>/<who>
// for heads of 128; <sequences>x<queries>x<keys> where each has several queries. who: read, the yardstick; precise,
// tensor, plain: the modes of decode(); parts16: precise with Attention{}.splits(16); most_keys: where the caller says
// how long sequences can be; early: that, launched programmatically, and with Attention{}.new_keys(). Of type
// bf16-latents are keys of 576 columns that all heads share, of which 512 are the values as well (MLA), with TFLOP/s.
// `error` is the mean difference from the same in double, over the mean size of that, of the first sequence's heads;
// registers (of a thread) and shared_kb (of a block) are those of the kernel.
#include <kernels/attention.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

constexpr int64_t kDim = 128;

template <class T>
double number(T x) { return double(k::convert<float>(x)); }

template <class T>
class Case : public bench::CaseBase {
  // Of queries and results.
  using Half = std::conditional_t<std::is_same<T, k::bfloat16>::value || std::is_same<T, float>::value, T, k::half>;
  static constexpr bool tensor_cores = !std::is_same<T, float>::value;
  // Of 4 bits eight codes lie in a word, and a head of a position has a scale of 16 bits.
  static constexpr bool words = std::is_same<T, k::Int4>::value;
  using Unit = std::conditional_t<words, uint32_t, T>;
  static constexpr double kBytesOfHead = words ? kDim / 2 + 2.0 : double(kDim * sizeof(T));

 public:
  Case(int64_t batch, int64_t queries, int64_t length, int64_t heads, int64_t kv_heads, int64_t page)
      : CaseBase("decode", bench::type_name<T>, shape_name(batch, queries, length, heads, kv_heads, page),
                 2.0 * double(batch) * double(length) * double(kv_heads) * kBytesOfHead, "share_of_read"),
        shape_{batch, queries, heads, kv_heads, kDim},
        length_(length),
        page_(page),
        each_(size_t(batch * length * kv_heads * kDim) / (words ? 8 : 1)) {
    for (int i = 0; i < sets_; ++i) kv_.push_back(buffer<Unit>((size_t(bytes_) + sizeof(Unit) - 1) / sizeof(Unit)));
    if (words) scales_ = buffer<k::half>(size_t(batch * length * kv_heads));
    q_ = buffer<Half>(size_t(batch * queries * heads * kDim));
    o_ = bench::arena().reserve<Half>(size_t(batch * queries * heads * kDim));
    lengths_ = bench::arena().reserve<int32_t>(size_t(batch));
    table_ = bench::arena().reserve<int32_t>(size_t(batch * pages()));
    const size_t room = std::max(k::decode_workspace_bytes(k::Exec{}, shape_),
                                 k::decode_workspace_bytes(k::Exec{}, shape_, k::Attention{}.splits(16)));
    workspace_ = {bench::arena().reserve<char>(room), room};
  }
  void start() {
    add("read", [this](benchmark::State& state) { report(state, measure_yardstick()); });
    if (tensor_cores) mode("precise", k::DecodeMode::precise);
    if (std::is_same<T, k::half>::value && page_ == 0)  // by a caller who says how long sequences can be
      mode("most_keys", k::DecodeMode::precise, k::Attention{}.most_keys(length_));
    if (std::is_same<T, k::half>::value && page_ == 0 && shape_.batch <= 8)  // and how many keys are new
      mode("early", k::DecodeMode::precise, k::Attention{}.most_keys(length_).new_keys(shape_.q_len), true);
    if (tensor_cores) mode("tensor", k::DecodeMode::tensor);
    if (page_ == 0) mode("plain", k::DecodeMode::plain);
    if (tensor_cores && page_ == 0 && shape_.batch <= 16)
      mode("parts16", k::DecodeMode::precise, k::Attention{}.splits(16));
  }

 private:
  static std::string shape_name(int64_t batch, int64_t queries, int64_t length, int64_t heads, int64_t kv_heads,
                                int64_t page) {
    const auto text = [](int64_t x) { return std::to_string(x); };
    return text(batch) + (queries > 1 ? "x" + text(queries) : "") + "x" + text(length) + "," + text(heads) + "/" +
           text(kv_heads) + "," + (page == 0 ? "dense" : "pages" + text(page));
  }
  int64_t pages() const { return page_ == 0 ? 0 : (length_ + page_ - 1) / page_; }
  int calls() const { return bench::calls_for(bytes_); }
  bench::Timing measure_yardstick() const override {
    return bench::read_us(sets_, [&](int i) { return kv_[size_t(i)]; }, size_t(bytes_), calls());
  }

  // early: launched before the kernel ahead has ended.
  void mode(const char* who, k::DecodeMode mode, const k::Attention& options = {}, bool early = false) {
    add(who, [this, mode, options, early](benchmark::State& state) {
      place();
      const auto with_call = [&](int i, const auto& use) {
        const Unit *keys = kv_[size_t(i)], *values = keys + each_;
        const int64_t positions = page_ == 0 ? length_ : page_, h = shape_.kv_heads;
        const auto tensor = [&](const Unit* p) {
          if constexpr (words)
            return k::nhd<T>(p, positions, h, kDim).scales(static_cast<const k::half*>(scales_), positions * h, h, 1);
          else
            return k::nhd(p, positions, h, kDim);
        };
        const auto key = tensor(keys), value = tensor(values);
        const auto q = k::load(static_cast<const Half*>(q_), shape_.heads * kDim);
        const auto o = k::store(o_, shape_.heads * kDim);
        if (page_ == 0) use(q, k::dense_kv(key, value, static_cast<const int32_t*>(lengths_)), o);
        else
          use(q, k::paged_kv(key, value, k::pages(table_, pages(), page_), static_cast<const int32_t*>(lengths_)), o);
      };
      const auto run = [&](cudaStream_t stream, int i) {
        with_call(i, [&](const auto& q, const auto& kv, const auto& o) {
          const k::Status status =
              k::decode<int(kDim)>(k::Exec(stream).programmatic(early).constant_weights(early), q, kv, o, shape_,
                                   k::no_mask(), workspace_, options, mode);
          if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
        });
      };
      report(state, bench::time_us(sets_, run, calls()));
      run(nullptr, 0);
      BENCH_CHECK(cudaDeviceSynchronize());
      if constexpr (!words) {
        if (page_ == 0 && length_ <= 16384) state.counters["error"] = error();
      }
      with_call(0, [&](const auto& q, const auto& kv, const auto& o) { put_size(state, mode, q, kv, o); });
    });
  }
  // What the kernel takes, for heads that share keys by eight at most.
  template <class Q, class Kv, class Out>
  void put_size(benchmark::State& state, k::DecodeMode mode, const Q& q, const Kv& kv, const Out& o) const {
    using Problem = k::detail::DecodeProblem<Q, Kv, decltype(k::no_mask()), Out>;
    const auto put = [&](const void* kernel, size_t dynamic) {
      cudaFuncAttributes attributes;
      BENCH_CHECK(cudaFuncGetAttributes(&attributes, kernel));
      state.counters["registers"] = attributes.numRegs;
      state.counters["shared_kb"] = double(attributes.sharedSizeBytes + dynamic) / 1024;
    };
    [[maybe_unused]] const auto tensor = [&](auto rows) {
      using Rows = std::remove_pointer_t<decltype(rows)>;
      using Body = k::detail::DecodeBody<Problem, Rows>;
      int image = 0;
      if (!k::detail::image_architecture<Body>(k::Exec{}, image)) std::exit(1);
      const auto kernel = &k::detail::entry<Body>;
      put(reinterpret_cast<const void*>(kernel), size_t(Rows::shared_bytes(image)));
    };
    if constexpr (tensor_cores) {
      if (mode == k::DecodeMode::precise)
        return tensor(static_cast<k::detail::TensorRows<Problem, kDim, kDim, 1, 2>*>(nullptr));
      if (mode == k::DecodeMode::tensor)
        return tensor(static_cast<k::detail::TensorRows<Problem, kDim, kDim, 1, 1>*>(nullptr));
    }
    Problem problem(q, kv, k::no_mask(), o, shape_, {});
    problem.dim = problem.v_dim = kDim;
    using Plain = k::detail::PlainRows<Problem, 1>;
    const auto kernel = &k::detail::entry<k::detail::DecodeBody<Problem, Plain>>;
    put(reinterpret_cast<const void*>(kernel), Plain::shared_bytes(problem));
  }
  // Lengths, and pages in any order.
  void place() {
    const std::vector<int32_t> lengths(size_t(shape_.batch), int32_t(length_)),
        table = bench::shuffled(size_t(shape_.batch * pages()));
    BENCH_CHECK(cudaMemcpy(lengths_, lengths.data(), lengths.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    if (!table.empty())
      BENCH_CHECK(cudaMemcpy(table_, table.data(), table.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  }
  double error() const {
    const size_t row = size_t(shape_.kv_heads * kDim), heads = size_t(shape_.heads), group = size_t(shape_.group());
    std::vector<T> keys(size_t(length_) * row), values(keys.size());
    std::vector<Half> q(heads * kDim), o(q.size());
    BENCH_CHECK(cudaMemcpy(keys.data(), kv_[0], keys.size() * sizeof(T), cudaMemcpyDeviceToHost));
    BENCH_CHECK(cudaMemcpy(values.data(), kv_[0] + each_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    BENCH_CHECK(cudaMemcpy(q.data(), q_, q.size() * sizeof(Half), cudaMemcpyDeviceToHost));
    BENCH_CHECK(cudaMemcpy(o.data(), o_, o.size() * sizeof(Half), cudaMemcpyDeviceToHost));
    double off = 0, size = 0;
    for (size_t h = 0; h < heads; h += 5) {
      std::vector<double> logits(size_t(length_), 0.0), sums(kDim, 0.0);
      double most = -HUGE_VAL, total = 0;
      for (size_t i = 0; i < logits.size(); ++i) {
        for (size_t c = 0; c < kDim; ++c)
          logits[i] += number(q[h * kDim + c]) * number(keys[i * row + h / group * kDim + c]);
        logits[i] /= std::sqrt(double(kDim)), most = std::max(most, logits[i]);
      }
      for (size_t i = 0; i < logits.size(); ++i) {
        const double p = std::exp(logits[i] - most);
        total += p;
        for (size_t c = 0; c < kDim; ++c) sums[c] += p * number(values[i * row + h / group * kDim + c]);
      }
      for (size_t c = 0; c < kDim; ++c)
        off += std::fabs(number(o[h * kDim + c]) - sums[c] / total), size += std::fabs(sums[c] / total);
    }
    return off / size;
  }

  k::AttentionShape shape_;
  int64_t length_, page_;
  size_t each_;
  std::vector<Unit*> kv_;
  k::half* scales_ = nullptr;
  Half *q_, *o_;
  int32_t *lengths_, *table_;
  k::Workspace workspace_;
};

class LatentCase : public bench::CaseBase {
  using T = k::bfloat16;
  static constexpr int64_t kKey = 576, kValue = 512, kPage = 64;

 public:
  LatentCase(int64_t batch, int64_t length, int64_t heads)
      : CaseBase("decode", "bf16-latents",
                 std::to_string(batch) + "x" + std::to_string(length) + "," + std::to_string(heads) + "/1,pages64",
                 double(batch) * double(length) * kKey * sizeof(T), "share_of_read"),
        shape_{batch, 1, heads, 1, kKey, kValue},
        length_(length) {
    for (int i = 0; i < sets_; ++i) kv_.push_back(buffer<T>(size_t(batch * length * kKey)));
    q_ = buffer<T>(size_t(batch * heads * kKey));
    o_ = bench::arena().reserve<T>(size_t(batch * heads * kValue));
    lengths_ = bench::arena().reserve<int32_t>(size_t(batch));
    table_ = bench::arena().reserve<int32_t>(size_t(batch * length / kPage));
    const size_t room = k::decode_workspace_bytes(k::Exec{}, shape_);
    workspace_ = {bench::arena().reserve<char>(room), room};
  }
  void start() {
    add("read", [this](benchmark::State& state) { report(state, measure_yardstick()); });
    mode("tensor", k::DecodeMode::tensor);
    if (shape_.batch == 1) mode("precise", k::DecodeMode::precise);
  }

 private:
  bench::Timing measure_yardstick() const override {
    return bench::read_us(sets_, [&](int i) { return kv_[size_t(i)]; }, size_t(bytes_), bench::calls_for(bytes_));
  }
  void mode(const char* who, k::DecodeMode mode) {
    add(who, [this, mode](benchmark::State& state) {
      const std::vector<int32_t> lengths(size_t(shape_.batch), int32_t(length_)),
          table = bench::shuffled(size_t(shape_.batch * length_ / kPage));
      BENCH_CHECK(cudaMemcpy(lengths_, lengths.data(), lengths.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
      BENCH_CHECK(cudaMemcpy(table_, table.data(), table.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
      const auto time = bench::time_us(sets_, [&](cudaStream_t stream, int i) {
        const auto latents = k::nhd(static_cast<const T*>(kv_[size_t(i)]), kPage, 1, kKey);
        const k::Status status = k::decode<int(kKey)>(
            stream, k::load(static_cast<const T*>(q_), shape_.heads * kKey),
            k::paged_kv(latents, latents, k::pages(table_, length_ / kPage, kPage),
                        static_cast<const int32_t*>(lengths_)),
            k::store(o_, shape_.heads * kValue), shape_, k::no_mask(), workspace_, k::Attention{}, mode);
        if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
      }, bench::calls_for(bytes_));
      report(state, time);
      state.counters["TFLOP/s"] =
          2.0 * double(shape_.batch * shape_.heads * length_) * (kKey + kValue) / time.us * 1e-6;
    });
  }

  k::AttentionShape shape_;
  int64_t length_;
  std::vector<T*> kv_;
  T *q_, *o_;
  int32_t *lengths_, *table_;
  k::Workspace workspace_;
};

template <class T>
void measure(int64_t heads, int64_t kv_heads, int64_t batch, int64_t length, int64_t page = 0, int64_t queries = 1) {
  std::make_shared<Case<T>>(batch, queries, length, heads, kv_heads, page)->start();
}

}  // namespace

int main(int argc, char** argv) {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1024},  {1, 4096},  {1, 16384}, {1, 65536}, {1, 131072}, {8, 4096},
                                                {16, 4096}, {32, 4096}, {16, 8192}, {64, 4096}, {128, 2048}};
  for (const auto& [batch, length] : shapes) measure<k::half>(32, 8, batch, length);
  for (const auto& [batch, length] : shapes) measure<k::bfloat16>(32, 8, batch, length);
  for (const auto& [batch, length] : shapes) measure<k::half>(32, 32, batch, length);
  for (const auto& [batch, length] : shapes) measure<k::half>(32, 8, batch, length, 16);
  for (const auto& [batch, length] : {shapes[1], shapes[4], shapes[9]}) {
    for (const int64_t page : {1, 64}) measure<k::half>(32, 8, batch, length, page);
  }
  for (const auto& [batch, length] : {shapes[0], shapes[1], shapes[4], shapes[6]}) {
    for (const int64_t queries : {4, 8}) measure<k::half>(32, 8, batch, length, 0, queries);
  }
  for (const auto& [batch, length] : shapes) measure<k::float8_e4m3>(32, 8, batch, length);
  for (const auto& [batch, length] : {shapes[1], shapes[4], shapes[8], shapes[9], shapes[10]})
    measure<k::Int4>(32, 8, batch, length);
  for (const auto& [batch, length] : {shapes[4], shapes[9]}) {
    measure<k::float8_e4m3>(32, 8, batch, length, 16);
    measure<k::Int4>(32, 8, batch, length, 16);
  }
  for (const auto& [batch, length] : {shapes[1], shapes[4], shapes[6], shapes[9]}) measure<float>(32, 8, batch, length);
  for (const int64_t heads : {16, 128}) {
    for (const auto& [batch, length] : {shapes[1], shapes[2], shapes[7], shapes[9], {128, 4096}})
      std::make_shared<LatentCase>(batch, length, heads)->start();
  }
  return bench::run(argc, argv, {});
}
