// Attention of many queries: 16,384 tokens in all, as many heads as make 2,048 columns. What is timed is named
//   attention/<type of keys>/d<dim>x<heads>x<length>/<full or causal>/kernels
// with the columns of values behind a hyphen where they differ from those of keys, the heads of keys behind a slash
// where there are fewer, and the size of pages behind a comma. Queries and results are bf16, with keys of fp32 fp32;
// fp8-products: queries, keys and values are e4m3, and multiplied as such. Of fp16, fp8-half, int8-half and int4-half
// queries and results are half, and codes are decoded to it. Causal attention counts half of the operations. Of
// d576-512 the values are columns of the keys (MLA). Three more kinds are causal, of 32 heads over 8 of keys with 128
// columns, keys in one run:
//   attention/bf16/d128x32/8x<queries>on<keys>/causal/<who>   a chunk of a long prompt: split, with a workspace, and
//                                                             whole, without
//   attention/bf16/d128x32/8x2x<prompt>+62/causal/<who>       two prompts and 62 single queries, which see as many
//       keys as the prompts: together and split, one call of attention() without and with a workspace; prompts,
//       singles, by attention() and decode(): the parts
//   attention/bf16/d128x32/8x<prompts>x<queries>/causal/<who> prompts of 16,384 tokens in all: even, one shape, and
//       ragged, with offsets; even_split and ragged_split, the same with a workspace
// bf16-soft_cap and bf16-own_soft_cap: with that score, which a user wrote in the second; bf16-alibi, bf16-window of
// 1,024 keys, bf16-mask of bits and bf16-bias of halves: with these, which all heads and sequences share.
// bench/attention_peers.py times bf16 in turns with PyTorch's kernels.
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
    return std::string("attention/") + type + "/d" + text(dim) + (v_dim == dim ? "" : "-" + text(v_dim)) + "x" +
           text(heads) + (heads == kv_heads ? "" : "/" + text(kv_heads)) + "x" + text(length) +
           (page == 0 ? "" : ",pages" + text(page)) + (causal ? "/causal" : "/full") + "/kernels";
  }
};

// Of 4 bits eight codes lie in a word, and a head of a position has a scale of 16 bits.
template <class T>
constexpr bool in_words = std::is_same<T, k::Int4>::value;
template <class T>
using Unit = std::conditional_t<in_words<T>, uint32_t, T>;

// Query: e4m3 with products of 8 bits.
template <class T, class Query, class S>
void run(benchmark::State& state, const Case& c, const S& score) {
  using Out = std::conditional_t<sizeof(Query) == 1, k::bfloat16, Query>;
  const auto options = k::Attention{}.in_8_bits(sizeof(Query) == 1);
  const int64_t width = c.heads * c.dim, v_width = c.heads * c.v_dim, in_unit = in_words<T> ? 8 : 1;
  const int64_t keys = c.kv_heads * c.dim * kTokens / in_unit, values = c.kv_heads * c.v_dim * kTokens / in_unit;
  const int sets =
      bench::sets_for(double(kTokens * (width + v_width)) * sizeof(Query) + double(keys + values) * sizeof(Unit<T>));
  bench::arena().reset();
  std::vector<Query*> q;
  std::vector<Out*> o;
  std::vector<Unit<T>*> key, value;
  for (int i = 0; i < sets; ++i) {
    q.push_back(bench::arena().take<Query>(size_t(kTokens * width), 4 * i + 1));
    key.push_back(bench::arena().take<Unit<T>>(size_t(keys), 4 * i + 2));
    value.push_back(bench::arena().take<Unit<T>>(size_t(values), 4 * i + 3));
    o.push_back(bench::arena().reserve<Out>(size_t(kTokens * v_width)));
  }
  const int64_t batch = kTokens / c.length, positions = c.page == 0 ? c.length : c.page, pages = kTokens / positions;
  const k::half* const scales = bench::arena().take<k::half>(size_t(kTokens * c.kv_heads), 5);
  const auto tensor = [&](const Unit<T>* p, int64_t dim) {
    if constexpr (in_words<T>)
      return k::nhd<T>(p, positions, c.kv_heads, dim).scales(scales, positions * c.kv_heads, c.kv_heads, 1);
    else
      return k::nhd(p, positions, c.kv_heads, dim);
  };
  int32_t *const table = bench::arena().reserve<int32_t>(size_t(pages)), *const lengths =
                                                                             bench::arena().reserve<int32_t>(
                                                                                 size_t(batch));
  const std::vector<int32_t> places = bench::shuffled(size_t(pages)), all(size_t(batch), int32_t(c.length));
  BENCH_CHECK(cudaMemcpy(table, places.data(), places.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  BENCH_CHECK(cudaMemcpy(lengths, all.data(), all.size() * sizeof(int32_t), cudaMemcpyHostToDevice));

  const double operations = 2.0 * kTokens * double(c.length) * double(width + v_width) * (c.causal ? 0.5 : 1);
  const bench::Timing time = bench::time_us(
      sets,
      [&](cudaStream_t stream, int i) {
        const auto call = [&](const auto& kv) {
          const k::Status status = k::attention(stream, k::load(static_cast<const Query*>(q[size_t(i)]), width), kv,
                                                k::store(o[size_t(i)], v_width),
                                                {batch, c.length, c.heads, c.kv_heads, c.dim, c.v_dim}, score, options);
          if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
        };
        const bool latents = c.dim == 576 && c.v_dim == 512;
        const auto keys_of = tensor(key[size_t(i)], c.dim),
                   values_of = latents ? keys_of : tensor(value[size_t(i)], c.v_dim);
        if (c.page == 0) return call(k::dense_kv(keys_of, values_of, c.length));
        if constexpr (std::is_same<T, k::bfloat16>::value)
          call(k::paged_kv(keys_of, values_of, k::pages(table, c.length / c.page, c.page), lengths));
      },
      operations > 1e12 ? 3 : 10, 9);
  bench::put(state, time);
  state.counters["TFLOP/s"] = operations / time.us * 1e-6;
}

template <class T, class Query>
const char* suffix_of() {
  if (sizeof(Query) == 1) return "-products";
  return std::is_same<Query, k::half>::value && !std::is_same<T, k::half>::value ? "-half" : "";
}

template <class T, class Query = std::conditional_t<std::is_same<T, float>::value, float, k::bfloat16>>
void add(Case c) {
  for (const bool causal : {false, true}) {
    c.causal = causal;
    benchmark::RegisterBenchmark(
        c.name((std::string(bench::type_name<T>) + suffix_of<T, Query>()).c_str()).c_str(),
        [=](benchmark::State& state) {
          if (c.causal)
            run<T, Query>(state, c, k::causal());
          else
            run<T, Query>(state, c, k::no_mask());
        })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

// The same formula as soft_cap(), as a user would write it.
struct OwnSoftCap : k::Score {
  float cap, inverse;
  explicit OwnSoftCap(float c) : cap(c), inverse(1 / c) {}
  template <int N>
  KERNELS_HD k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt&) const {
    for (int i = 0; i < N; ++i) logits.v[i] = cap * k::fast_tanh(logits.v[i] * inverse);
    return logits;
  }
};
// make(): the score. It is asked for when the case runs, as it may have memory of its own.
template <class Make>
void add_scored(const char* scored, Case c, const Make& make) {
  c.causal = true;
  benchmark::RegisterBenchmark(c.name(("bf16-" + std::string(scored)).c_str()).c_str(), [=](benchmark::State& state) {
    run<k::bfloat16, k::bfloat16>(state, c, k::causal() & make());
  })->Iterations(1)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

// A matrix for all sequences and heads, which stays.
template <class T>
const T* matrix(int64_t elements) {
  static T* const p = [=] {
    T* all = nullptr;
    BENCH_CHECK(cudaMalloc(&all, size_t(elements) * sizeof(T)));
    bench::fill(all, size_t(elements), 1);
    return all;
  }();
  return p;
}

constexpr int64_t kHeads = 32, kKvHeads = 8, kDim = 128;
using T = k::bfloat16;

// Rows of keys of a call: sequences of `keys` each.
struct Cache {
  int64_t batch, keys;
  std::vector<T*> key, value;
  Cache(int64_t sequences, int64_t length, int sets) : batch(sequences), keys(length) {
    for (int i = 0; i < sets; ++i) {
      for (auto* side : {&key, &value})
        side->push_back(bench::arena().take<T>(size_t(batch * keys * kKvHeads * kDim), key.size() + value.size() + 1));
    }
  }
  auto view(int i, const int32_t* lengths, int64_t first = 0) const {
    const auto tensor = [&](const T* p) { return k::nhd(p + first * keys * kKvHeads * kDim, keys, kKvHeads, kDim); };
    return k::dense_kv(tensor(key[size_t(i)]), tensor(value[size_t(i)]), lengths);
  }
};
k::Workspace take_workspace(size_t bytes) { return {bench::arena().reserve<char>(bytes), bytes}; }
const int32_t* take_numbers(const std::vector<int32_t>& values) {
  int32_t* const p = bench::arena().reserve<int32_t>(values.size());
  BENCH_CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  return p;
}
void expect(const k::Status& status) {
  if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
}
void report(benchmark::State& state, const bench::Timing& time, double operations) {
  bench::put(state, time);
  state.counters["TFLOP/s"] = operations / time.us * 1e-6;
}
void add_case(const std::string& name, const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(("attention/bf16/d128x32/8x" + name).c_str(), run)
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

// Causal, with a workspace where keys may be split.
template <class Kv>
void attend(cudaStream_t stream, const T* q, const Kv& kv, T* o, const k::AttentionShape& shape, bool split,
            const k::Workspace& workspace) {
  constexpr int64_t width = kHeads * kDim;
  const auto from = k::load(q, width);
  const auto to = k::store(o, width);
  if (split)
    expect(k::attention<int(kDim)>(stream, from, kv, to, shape, k::causal(), workspace, {}));
  else
    expect(k::attention<int(kDim)>(stream, from, kv, to, shape, k::causal()));
}

void chunk(benchmark::State& state, int64_t queries, int64_t keys, bool split) {
  constexpr int64_t width = kHeads * kDim;
  bench::arena().reset();
  const int sets = bench::sets_for(4.0 * double(keys * kKvHeads * kDim));
  const Cache cache(1, keys, sets);
  const T* const q = bench::arena().take<T>(size_t(queries * width), 99);
  T* const o = bench::arena().reserve<T>(size_t(queries * width));
  const int32_t* const lengths = take_numbers({int32_t(keys)});
  const k::AttentionShape shape{1, queries, kHeads, kKvHeads, kDim};
  const k::Workspace workspace = take_workspace(k::attention_workspace_bytes(k::Exec{}, shape));
  const auto time = bench::time_us(
      sets, [&](cudaStream_t stream, int i) { attend(stream, q, cache.view(i, lengths), o, shape, split, workspace); },
      4, 9);
  report(state, time,
         4.0 * double(width) * (double(queries) * double(keys) - double(queries) * double(queries - 1) / 2));
}

void prompts(benchmark::State& state, int64_t queries, bool ragged, bool split) {
  constexpr int64_t width = kHeads * kDim;
  bench::arena().reset();
  const int64_t batch = kTokens / queries;
  const Cache cache(batch, queries, 1);
  const T* const q = bench::arena().take<T>(size_t(kTokens * width), 99);
  T* const o = bench::arena().reserve<T>(size_t(kTokens * width));
  std::vector<int32_t> offsets;
  for (int64_t b = 0; b <= batch; ++b) offsets.push_back(int32_t(b * queries));
  const int32_t* const lengths = take_numbers(std::vector<int32_t>(size_t(batch), int32_t(queries)));
  k::AttentionShape shape{batch, queries, kHeads, kKvHeads, kDim};
  if (ragged) shape.q_offsets = take_numbers(offsets), shape.tokens = kTokens;
  const k::Workspace workspace = take_workspace(k::attention_workspace_bytes(k::Exec{}, shape));
  const auto time = bench::time_us(
      1, [&](cudaStream_t stream, int) { attend(stream, q, cache.view(0, lengths), o, shape, split, workspace); }, 4,
      9);
  report(state, time, 2.0 * double(width) * double(kTokens) * double(queries));
}

enum class Mixed { together, split, prompts, singles };
void mixed(benchmark::State& state, int64_t prompt, Mixed what) {
  constexpr int64_t width = kHeads * kDim, prompts = 2, singles = 62, batch = prompts + singles;
  bench::arena().reset();
  const int64_t tokens = prompts * prompt + singles;
  const Cache cache(batch, prompt, 1);
  const T* const q = bench::arena().take<T>(size_t(tokens * width), 99);
  T* const o = bench::arena().reserve<T>(size_t(tokens * width));
  // A prompt comes first and another last.
  std::vector<int32_t> offsets{0, int32_t(prompt)};
  for (int64_t i = 0; i < singles; ++i) offsets.push_back(offsets.back() + 1);
  offsets.push_back(int32_t(tokens));
  const int32_t *const begins = take_numbers(offsets), *const prompt_begins =
                                                           take_numbers({0, int32_t(prompt), int32_t(2 * prompt)});
  const int32_t* const lengths = take_numbers(std::vector<int32_t>(size_t(batch), int32_t(prompt)));
  const k::AttentionShape shape{batch, prompt, kHeads, kKvHeads, kDim, 0, begins, tokens},
      of_prompts{prompts, prompt, kHeads, kKvHeads, kDim, 0, prompt_begins, 2 * prompt},
      of_singles{singles, 1, kHeads, kKvHeads, kDim};
  const k::Attention options = k::Attention{}.most_keys(prompt);
  const k::Workspace workspace = take_workspace(std::max(k::attention_workspace_bytes(k::Exec{}, shape, options),
                                                         k::decode_workspace_bytes(k::Exec{}, of_singles)));
  const auto time = bench::time_us(1, [&](cudaStream_t stream, int) {
    const auto from = [&](int64_t row) { return k::load(q + row * width, width); };
    const auto to = [&](int64_t row) { return k::store(o + row * width, width); };
    switch (what) {
      case Mixed::together:
        return expect(k::attention<int(kDim)>(stream, from(0), cache.view(0, lengths), to(0), shape, k::causal()));
      case Mixed::split:
        return expect(k::attention<int(kDim)>(stream, from(0), cache.view(0, lengths), to(0), shape, k::causal(),
                                              workspace, options));
      case Mixed::prompts:
        return expect(k::attention<int(kDim)>(stream, from(0), cache.view(0, lengths), to(0), of_prompts, k::causal()));
      default:
        return expect(k::decode<int(kDim)>(stream, from(prompt), cache.view(0, lengths, 1), to(prompt), of_singles,
                                           k::causal(), workspace));
    }
  }, 4, 9);
  const double of_prompt = 4.0 * double(width) * double(prompt) * double(prompt + 1) / 2,
               of_single = 4.0 * double(width) * double(prompt);
  report(state, time,
         (what == Mixed::singles ? 0 : double(prompts) * of_prompt) +
             (what == Mixed::prompts ? 0 : double(singles) * of_single));
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t dim : {64, 128, 256}) {
    for (int64_t length = 512; length <= kTokens; length *= 2) add<k::bfloat16>({dim, 2048 / dim, 2048 / dim, length});
  }
  for (int64_t length = 512; length <= kTokens; length *= 2) add<k::bfloat16>({128, 32, 8, length});
  for (int64_t length = 512; length <= kTokens; length *= 2) add<k::float8_e4m3, k::float8_e4m3>({128, 16, 16, length});
  for (const int64_t length : {1024, 8192, 16384}) {
    const Case c{128, 16, 16, length};
    add<k::float8_e4m3>(c), add<k::half, k::half>(c);
    add<k::float8_e4m3, k::half>(c), add<int8_t, k::half>(c), add<k::Int4, k::half>(c);
  }
  for (const int64_t length : {1024, 8192}) {
    for (const int64_t page : {16, 64}) add<k::bfloat16>({128, 16, 16, length, 128, page});
    add<k::float8_e4m3>({64, 32, 32, length}), add<k::float8_e4m3>({256, 8, 8, length});
    add<k::Int4>({128, 16, 16, length});
    add<float>({128, 16, 16, length});
    add<k::bfloat16>({96, 16, 16, length});
    add<k::bfloat16>({192, 16, 16, length, 128});
    add<k::bfloat16>({576, 4, 4, length, 512}), add<k::bfloat16>({576, 16, 1, length, 512});
  }
  for (const int64_t length : {1024, 8192}) {
    const Case c{128, 16, 16, length};
    constexpr int64_t most = 8192;
    add_scored("soft_cap", c, [] { return k::soft_cap(30.f); });
    add_scored("own_soft_cap", c, [] { return OwnSoftCap(30.f); });
    add_scored("alibi", c, [] { return k::alibi(matrix<float>(16)); });
    add_scored("window", c, [] { return k::window(1023, 0); });
    add_scored("mask", c, [=] { return k::bitmask(matrix<uint32_t>(most * most / 32), length / 32, 0); });
    add_scored("bias", c, [=] { return k::score_bias(matrix<k::half>(most * most), 0, 0, length); });
  }
  for (const int64_t queries : {64, 256, 320, 512}) {
    const std::string name = std::to_string(queries) + "on100000/causal/";
    add_case(name + "split", [=](benchmark::State& state) { chunk(state, queries, 100000, true); });
    add_case(name + "whole", [=](benchmark::State& state) { chunk(state, queries, 100000, false); });
  }
  const std::pair<const char*, Mixed> kinds[] = {
      {"together", Mixed::together}, {"split", Mixed::split}, {"prompts", Mixed::prompts}, {"singles", Mixed::singles}};
  for (const auto& kind : kinds) {
    add_case(std::string("2x4096+62/causal/") + kind.first,
             [what = kind.second](benchmark::State& state) { mixed(state, 4096, what); });
  }
  for (const int64_t queries : {256, 1024, 4096}) {
    for (const bool ragged : {false, true}) {
      for (const bool split : {false, true})
        add_case(std::to_string(kTokens / queries) + "x" + std::to_string(queries) + "/causal/" +
                     (ragged ? "ragged" : "even") + (split ? "_split" : ""),
                 [=](benchmark::State& state) { prompts(state, queries, ragged, split); });
    }
  }
  return bench::run(argc, argv, {});
}
