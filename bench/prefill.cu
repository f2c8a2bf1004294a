// Attention of many queries: 16,384 tokens in all, as many heads as make 2,048 columns. What is timed is named
//   attention/<type of keys>/d<dim>x<heads>x<length>/<full or causal>/kernels
// with the columns of values behind a hyphen where they differ from those of keys, the heads of keys behind a slash where there are
// fewer, and the size of pages behind a comma. Queries and results are bf16, with keys of fp32 fp32. Causal attention counts half of the
// operations. bench/attention_peers.py times PyTorch's kernels on the same shapes.
#include <kernels/attention.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

constexpr int64_t kTokens = 16384;

struct Case {
  int64_t dim, heads, kv_heads, length, v_dim = dim, page = 0;
  bool causal = false;

  std::string name(const char* type) const {
    const auto text = [](int64_t x) { return std::to_string(x); };
    return std::string("attention/") + type + "/d" + text(dim) + (v_dim == dim ? "" : "-" + text(v_dim)) + "x" + text(heads) + (heads == kv_heads ? "" : "/" + text(kv_heads)) + "x" +
           text(length) + (page == 0 ? "" : ",pages" + text(page)) + (causal ? "/causal" : "/full") + "/kernels";
  }
};

// Of 4 bits eight codes lie in a word, and a head of a position has a scale of 16 bits.
template <class T>
constexpr bool in_words = std::is_same<T, k::Int4>::value;
template <class T>
using Unit = std::conditional_t<in_words<T>, uint32_t, T>;

template <class T, class S>
void run(benchmark::State& state, const Case& c, const S& score) {
  using Query = std::conditional_t<std::is_same<T, float>::value, float, k::bfloat16>;
  const int64_t width = c.heads * c.dim, v_width = c.heads * c.v_dim, in_unit = in_words<T> ? 8 : 1;
  const int64_t keys = c.kv_heads * c.dim * kTokens / in_unit, values = c.kv_heads * c.v_dim * kTokens / in_unit;
  const int sets = bench::sets_for(double(kTokens * (width + v_width)) * sizeof(Query) + double(keys + values) * sizeof(Unit<T>));
  bench::arena().reset();
  std::vector<Query*> q, o;
  std::vector<Unit<T>*> key, value;
  for (int i = 0; i < sets; ++i) {
    q.push_back(bench::arena().take<Query>(size_t(kTokens * width), 4 * i + 1));
    key.push_back(bench::arena().take<Unit<T>>(size_t(keys), 4 * i + 2));
    value.push_back(bench::arena().take<Unit<T>>(size_t(values), 4 * i + 3));
    o.push_back(bench::arena().reserve<Query>(size_t(kTokens * v_width)));
  }
  const int64_t batch = kTokens / c.length, positions = c.page == 0 ? c.length : c.page, pages = kTokens / positions;
  const k::half* const scales = bench::arena().take<k::half>(size_t(kTokens * c.kv_heads), 5);
  const auto tensor = [&](const Unit<T>* p, int64_t dim) {
    if constexpr (in_words<T>) return k::nhd<T>(p, positions, c.kv_heads, dim).scales(scales, positions * c.kv_heads, c.kv_heads, 1);
    else return k::nhd(p, positions, c.kv_heads, dim);
  };
  int32_t *const table = bench::arena().reserve<int32_t>(size_t(pages)), *const lengths = bench::arena().reserve<int32_t>(size_t(batch));
  const std::vector<int32_t> places = bench::shuffled(size_t(pages)), all(size_t(batch), int32_t(c.length));
  BENCH_CHECK(cudaMemcpy(table, places.data(), places.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  BENCH_CHECK(cudaMemcpy(lengths, all.data(), all.size() * sizeof(int32_t), cudaMemcpyHostToDevice));

  const double operations = 2.0 * kTokens * double(c.length) * double(width + v_width) * (c.causal ? 0.5 : 1);
  const bench::Timing time = bench::time_us(sets, [&](cudaStream_t stream, int i) {
    const auto call = [&](const auto& kv) {
      const k::Status status = k::attention(stream, k::load(static_cast<const Query*>(q[size_t(i)]), width), kv, k::store(o[size_t(i)], v_width),
                                            {batch, c.length, c.heads, c.kv_heads, c.dim, c.v_dim}, score);
      if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
    };
    const auto keys_of = tensor(key[size_t(i)], c.dim), values_of = tensor(value[size_t(i)], c.v_dim);
    if (c.page == 0) return call(k::dense_kv(keys_of, values_of, c.length));
    if constexpr (std::is_same<T, k::bfloat16>::value) call(k::paged_kv(keys_of, values_of, k::pages(table, c.length / c.page, c.page), lengths));
  }, operations > 1e12 ? 3 : 10, 9);
  bench::put(state, time);
  state.counters["TFLOP/s"] = operations / time.us * 1e-6;
}

template <class T>
void add(Case c) {
  for (const bool causal : {false, true}) {
    c.causal = causal;
    benchmark::RegisterBenchmark(c.name(bench::type_name<T>).c_str(), [=](benchmark::State& state) {
      if (c.causal) run<T>(state, c, k::causal());
      else run<T>(state, c, k::no_mask());
    })->Iterations(1)->UseManualTime()->Unit(benchmark::kMicrosecond);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t dim : {64, 128, 256}) {
    for (int64_t length = 512; length <= kTokens; length *= 2) add<k::bfloat16>({dim, 2048 / dim, 2048 / dim, length});
  }
  for (int64_t length = 512; length <= kTokens; length *= 2) add<k::bfloat16>({128, 32, 8, length});
  for (const int64_t length : {1024, 8192}) {
    add<k::bfloat16>({128, 16, 16, length, 128, 16});
    add<k::float8_e4m3>({128, 16, 16, length});
    add<k::Int4>({128, 16, 16, length});
    add<float>({128, 16, 16, length});
    add<k::bfloat16>({96, 16, 16, length});
    add<k::bfloat16>({192, 16, 16, length, 128});
    add<k::bfloat16>({576, 4, 4, length, 512});
  }
  return bench::run(argc, argv, {});
}
