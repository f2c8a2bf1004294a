// FAILS ROWS_POINTER: a pointer where there must be a source
// FAILS ROWS_MAP: a map where there must be a source: k::load(p, ld) | map
// FAILS ROWS_SINK_FIRST: a sink where there must be a source
// FAILS ROWS_NUMBER: there must be a source here
// FAILS ROWS_WEIGHTS: weights where there must be a source
// FAILS ROWS_POINTER_LAST: a pointer where there must be a sink
// FAILS ROWS_SOURCE_LAST: a source where there must be a sink
// FAILS ROWS_MAP_LAST: a map where there must be a sink
// FAILS RMSNORM_EPS: rmsnorm: a number where there must be options: k::RmsNorm{}.eps(1e-6)
// FAILS LAYERNORM_EPS: layernorm: a number where there must be options: k::LayerNorm{}.eps(1e-5)
// FAILS RMSNORM_OPTIONS: rmsnorm: options of LayerNorm where there must be those of RmsNorm: k::RmsNorm{}.eps(1e-6)
// FAILS LAYERNORM_OPTIONS: layernorm: options of RmsNorm where there must be those of LayerNorm
// FAILS COPY_POINTER: a pointer where there must be a source
// FAILS COPY_GATED: gated() becomes one with swiglu()
// FAILS GATED_HALVES: gate_up() reads a row in two places
// FAILS GLU_OF_ONE_SOURCE: swiglu() and other glu() behind one source: k::gated(gate, up) | k::swiglu()
// FAILS GLU_BEFORE_A_SINK: swiglu() and other glu() before a sink are for products
// FAILS GLU_BEHIND_A_ROW: swiglu() and other glu() before a sink are for products
// FAILS GLU_OF_A_NUMBER: glu() takes a map of single values
// FAILS MAP_WITH_A_STATE: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS MAP_OF_NOTHING: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS GLU_WITH_A_STATE: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS EMBED_A_MAP: embed() takes a source with the rows of the table
// FAILS EMBED_BY_FLOATS: ids are numbers of 32 or 64 bits
// FAILS EMBED_A_TEE: embed() may read a row of its table any number of times
// FAILS MATMUL_POINTER: a pointer where there must be a source
// FAILS MATMUL_POINTER_TO_WEIGHTS: a pointer where there must be a source
// FAILS MATMUL_MAP: a map where there must be a source
// FAILS MATMUL_SOURCE_LAST: a source where there must be a sink
// FAILS MATMUL_GATED_INPUTS: weights where there must be a source
// FAILS MATMUL_GATED_ALONE: gated() weights go with a sink that begins with swiglu()
// FAILS MATMUL_SWIGLU_ALONE: swiglu(), geglu() and other glu() make one result of two
// FAILS MATMUL_QUANTIZE: quantize() needs a whole row of results
// FAILS MATMUL_SCALES_POINTER: a pointer or a number where there must be scales: k::tensor_scale(p)
// FAILS MATMUL_SCALES_NUMBER: a pointer or a number where there must be scales: k::tensor_scale(p)
// FAILS MATMUL_WORDS: weights are packed words: k::dequant(k::int4(p, ld), scales)
// FAILS MATMUL_SCALED_WORDS: weights are packed words: k::dequant(k::int4(p, ld), scales)
// FAILS MATMUL_STACKED_WORDS: weights are packed words: k::dequant(k::int4(p, ld), scales)
// FAILS MATMUL_GATED_WORDS: weights are packed words: k::dequant(k::int4(p, ld), scales)
// FAILS QUANTIZE_INTEGER_SCALES: quantize() writes the scales that it finds as float, half or bfloat16
// FAILS QUANTIZE_TO_HALVES: quantize() writes int8_t, float8_e4m3 or float8_e5m2
// FAILS QUANTIZE_GROUPS_TO_HALVES: quantize() writes int8_t, float8_e4m3 or float8_e5m2
// FAILS QUANTIZE_BY_SCALES_TO_HALVES: quantize() writes int8_t, float8_e4m3 or float8_e5m2
// FAILS QUANTIZE_INTEGER_GROUPS: quantize() writes the scales that it finds as float, half or bfloat16
// FAILS GATED_TYPES: two matrices of one type
// FAILS ATTENTION_ROW_MAP: the score of attention is k::causal()
// FAILS DECODE_ROW_MAP: the score of attention is k::causal()
// FAILS ATTENTION_NO_SCORE: there must be a score behind the shape
// FAILS DECODE_NO_SCORE: there must be a score behind the shape
// FAILS DECODE_WORKSPACE_ALONE: there must be a score behind the shape
// FAILS DECODE_NO_WORKSPACE: decode: a workspace goes behind the score
// FAILS DECODE_OPTIONS_ALONE: decode: a workspace goes behind the score
// FAILS DECODE_OPTIONS_FIRST: decode: a workspace goes behind the score, and options behind that
// FAILS DECODE_OPTIONS_FOR_A_SCORE: there must be a score here
// FAILS ATTENTION_OPTIONS_FIRST: attention: options go behind the workspace
// FAILS ATTENTION_TRUE: there must be a score here
// FAILS ATTENTION_EMPTY: there must be a score here
// FAILS ATTENTION_MISSPELLED: declared as KERNELS_HD bool visible(const k::ScoreAt& at) const
// FAILS ATTENTION_MISSPELLED_PART: declared as KERNELS_HD bool visible(const k::ScoreAt& at) const
// FAILS ATTENTION_MASKED_IN_RUNS: a score with visible_keys() and without visible()
// FAILS ATTENTION_MAP: a map where there must be a score
// FAILS ATTENTION_PIPE: k::causal() & k::soft_cap(30)
// FAILS ATTENTION_ROW_MAP_AND: k::causal() & k::soft_cap(30)
// FAILS SOFT_CAP_OF_VALUES: The soft cap of values is k::scale(1 / cap) | k::tanh() | k::scale(cap)
// FAILS ATTENTION_POINTER: a pointer where there must be a source
// FAILS ATTENTION_KEYS: there must be a view of keys and values here
// FAILS ATTENTION_TENSOR: there must be a view of keys and values here
// FAILS KEYS_POINTERS: kv: keys and values are tensors, which say where heads and positions lie: k::nhd
// FAILS RAGGED_POINTERS: kv: keys and values are tensors, which say where heads and positions lie: k::nhd
// FAILS PAGED_SOURCES: kv: keys and values are tensors, which say where heads and positions lie: k::nhd
// FAILS KEYS_SCALE: kv: a number where there must be a pointer: scale(p) reads *p
// FAILS KEYS_SCALES: kv: a number where there must be a pointer: scale(p) reads *p
// FAILS KEYS_HEAD_SCALES: kv: a number where there must be a pointer: scale(p) reads *p
// FAILS ATTENTION_SCALE: a number where there must be options: k::Attention{}.scale(s)
// FAILS ATTENTION_SOURCE_LAST: a source where there must be a sink
// FAILS MERGE_POINTER: a pointer where there must be a source
// FAILS SAMPLE_POINTER: a pointer where there must be a source
// FAILS SAMPLE_MAP: a map where there must be a source
// FAILS SAMPLE_TEE: sampling reads logits more than once
// FAILS SAMPLE_TEMPERATURE: a number where there must be options: k::Sampling{}.temperature(t)
// FAILS SAMPLE_FLOATS: tokens are numbers of 32 or 64 bits
// FAILS VERIFY_SINK: a sink where there must be a source
// FAILS LOG_PROBS_WEIGHTS: weights where there must be a source
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/sampling.h>
#include <kernels/cpu/softmax.h>

namespace k = kernels;

struct Empty {};
struct Counting : k::Elementwise<Counting> {
  float count = 0;
  float operator()(float x) { return x + count++; }
};
struct Nameless : k::Elementwise<Nameless> {};
struct Misspelled : k::Score {
  bool visible(const k::ScoreAt& at) { return at.key == 0; }
};
struct InRuns : k::Score {
  uint32_t visible_keys(const k::ScoreAt&) const { return 1; }
  float sink(int64_t) const { return 0; }
};
struct Own : k::Score {
  bool visible(const k::ScoreAt& at) const { return at.key == 0; }
};

k::Status f(const float* p, float* y, int8_t* codes, k::half* halves, const k::AttentionShape& shape, int64_t n) {
  const k::cpu::Exec cx{1};
  const auto in = k::load(p, n);
  const auto out = k::store(y, n);
  const auto quantize = k::quantize(codes, n, y);
  const auto side = k::nhd(p, n, 1, 64);
  const auto kv = k::dense_kv(side, side, n);
  const k::MatmulShape product{n, n, n};
  const int32_t ids[] = {0};
  const uint32_t words[] = {0};
  int32_t tokens[] = {0};
  (void)in, (void)out, (void)quantize, (void)kv, (void)shape, (void)product, (void)ids, (void)tokens, (void)halves;
  (void)words;
#if defined(ROWS_POINTER)
  return k::cpu::softmax(cx, p, out, n, n);
#elif defined(ROWS_MAP)
  return k::cpu::softmax(cx, k::scale(2), out, n, n);
#elif defined(ROWS_SINK_FIRST)
  return k::cpu::softmax(cx, out, out, n, n);
#elif defined(ROWS_NUMBER)
  return k::cpu::softmax(cx, 1.f, out, n, n);
#elif defined(ROWS_WEIGHTS)
  return k::cpu::softmax(cx, k::gated(in, in), out, n, n);
#elif defined(ROWS_POINTER_LAST)
  return k::cpu::softmax(cx, in, y, n, n);
#elif defined(ROWS_SOURCE_LAST)
  return k::cpu::softmax(cx, in, k::load(y, n), n, n);
#elif defined(ROWS_MAP_LAST)
  return k::cpu::softmax(cx, in, k::scale(2), n, n);
#elif defined(RMSNORM_EPS)
  return k::cpu::rmsnorm(cx, in, out, n, n, 1e-6);
#elif defined(LAYERNORM_EPS)
  return k::cpu::layernorm(cx, in, out, n, n, 1e-5f);
#elif defined(RMSNORM_OPTIONS)
  return k::cpu::rmsnorm(cx, in, out, n, n, k::LayerNorm{});
#elif defined(LAYERNORM_OPTIONS)
  return k::cpu::layernorm(cx, in, out, n, n, k::RmsNorm{}.eps(1e-5));
#elif defined(COPY_POINTER)
  return k::cpu::copy(cx, y, out, n, n);
#elif defined(COPY_GATED)
  return k::cpu::copy(cx, k::gated(in, in), out, n, n);
#elif defined(GATED_HALVES)
  return k::cpu::copy(cx, k::gate_up(in | k::tee(y, n), n / 2) | k::swiglu(), out, n, n);
#elif defined(GLU_OF_ONE_SOURCE)
  return k::cpu::copy(cx, in | k::scale(2) | k::swiglu(), out, n, n);
#elif defined(GLU_BEFORE_A_SINK)
  return k::cpu::copy(cx, in, k::swiglu() | out, n, n);
#elif defined(GLU_BEHIND_A_ROW)
  return k::cpu::softmax(cx, in, k::scale(2) | k::swiglu() | out, n, n);
#elif defined(GLU_OF_A_NUMBER)
  return k::cpu::copy(cx, k::gated(in, in) | k::glu(2), out, n, n);
#elif defined(MAP_WITH_A_STATE)
  return k::cpu::copy(cx, in | Counting{}, out, n, n);
#elif defined(MAP_OF_NOTHING)
  return k::cpu::copy(cx, in, Nameless{} | out, n, n);
#elif defined(GLU_WITH_A_STATE)
  return k::cpu::copy(cx, k::gated(in, in) | k::glu(Counting{}), out, n, n);
#elif defined(EMBED_A_MAP)
  return k::cpu::copy(cx, k::embed(k::scale(2), ids, n), out, n, n);
#elif defined(EMBED_BY_FLOATS)
  return k::cpu::copy(cx, k::embed(in, y, n), out, n, n);
#elif defined(EMBED_A_TEE)
  return k::cpu::copy(cx, k::embed(in | k::tee(y, n), ids, n), out, n, n);
#elif defined(MATMUL_POINTER)
  return k::cpu::matmul(cx, p, in, out, product);
#elif defined(MATMUL_POINTER_TO_WEIGHTS)
  return k::cpu::matmul(cx, in, p, out, product);
#elif defined(MATMUL_MAP)
  return k::cpu::matmul(cx, k::gelu(), in, out, product);
#elif defined(MATMUL_SOURCE_LAST)
  return k::cpu::matmul(cx, in, in, in, product);
#elif defined(MATMUL_GATED_INPUTS)
  return k::cpu::matmul(cx, k::gated(in, in), in, out, product);
#elif defined(MATMUL_GATED_ALONE)
  return k::cpu::matmul(cx, in, k::gated(in, in), k::relu() | out, product);
#elif defined(MATMUL_SWIGLU_ALONE)
  return k::cpu::matmul(cx, in, in, k::swiglu() | out, product);
#elif defined(MATMUL_QUANTIZE)
  return k::cpu::matmul(cx, in, in, quantize, product);
#elif defined(MATMUL_SCALES_POINTER)
  return k::cpu::matmul(cx, in, k::dequant(k::load(codes, n), halves), out, product);
#elif defined(MATMUL_SCALES_NUMBER)
  return k::cpu::matmul(cx, in, k::dequant(k::load(codes, n), 0.5f), out, product);
#elif defined(MATMUL_WORDS)
  return k::cpu::matmul(cx, in, k::load(words, n), out, product);
#elif defined(MATMUL_SCALED_WORDS)
  return k::cpu::matmul(cx, in, k::dequant(k::load(ids, n), k::row_scales(p)), out, product);
#elif defined(MATMUL_STACKED_WORDS)
  return k::cpu::matmul(cx, in, k::stacked(k::load(words, n), n, k::load(words, n), n), out, product);
#elif defined(MATMUL_GATED_WORDS)
  return k::cpu::matmul(cx, in, k::gated(k::load(words, n), k::load(words, n)), k::swiglu() | out, product);
#elif defined(QUANTIZE_INTEGER_SCALES)
  return k::cpu::copy(cx, in, k::quantize(codes, n, tokens), n, n);
#elif defined(QUANTIZE_TO_HALVES)
  return k::cpu::rmsnorm(cx, in, k::quantize(halves, n, y), n, n);
#elif defined(QUANTIZE_GROUPS_TO_HALVES)
  return k::cpu::copy(cx, in, k::quantize(halves, n, y, n, 16), n, n);
#elif defined(QUANTIZE_BY_SCALES_TO_HALVES)
  return k::cpu::copy(cx, in, k::quantize(halves, n, k::tensor_scale(p)), n, n);
#elif defined(QUANTIZE_INTEGER_GROUPS)
  return k::cpu::copy(cx, in, k::quantize(codes, n, tokens, n, 16), n, n);
#elif defined(GATED_TYPES)
  return k::cpu::matmul(cx, in, k::gated(in, k::load(codes, n)), k::swiglu() | out, product);
#elif defined(ATTENTION_ROW_MAP)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal(4, 4));
#elif defined(DECODE_ROW_MAP)
  return k::cpu::decode(cx, in, kv, out, shape, k::causal(4, 4), k::Workspace{});
#elif defined(ATTENTION_NO_SCORE)
  return k::cpu::attention(cx, in, kv, out, {1, 1, 1, 1, 64});
#elif defined(DECODE_NO_SCORE)
  return k::cpu::decode(cx, in, kv, out, shape);
#elif defined(DECODE_WORKSPACE_ALONE)
  return k::cpu::decode<64>(cx, in, kv, out, shape, k::Workspace{}, k::Attention{}.scale(1));
#elif defined(DECODE_NO_WORKSPACE)
  return k::cpu::decode(cx, in, kv, out, shape, k::causal());
#elif defined(DECODE_OPTIONS_ALONE)
  return k::cpu::decode(cx, in, kv, out, shape, k::causal(), k::Attention{}.scale(1));
#elif defined(DECODE_OPTIONS_FIRST)
  return k::cpu::decode<64>(cx, in, kv, out, shape, k::causal(), k::Attention{}, k::Workspace{});
#elif defined(DECODE_OPTIONS_FOR_A_SCORE)
  return k::cpu::decode(cx, in, kv, out, shape, k::Attention{});
#elif defined(ATTENTION_OPTIONS_FIRST)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal(), k::Attention{}.scale(1), k::Workspace{});
#elif defined(ATTENTION_TRUE)
  return k::cpu::attention(cx, in, kv, out, shape, true);
#elif defined(ATTENTION_EMPTY)
  return k::cpu::attention(cx, in, kv, out, shape, Empty{});
#elif defined(ATTENTION_MISSPELLED)
  return k::cpu::attention(cx, in, kv, out, shape, Misspelled{});
#elif defined(ATTENTION_MISSPELLED_PART)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal() & Misspelled{});
#elif defined(ATTENTION_MASKED_IN_RUNS)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal() & InRuns{});
#elif defined(ATTENTION_MAP)
  return k::cpu::attention(cx, in, kv, out, shape, k::scale(2));
#elif defined(ATTENTION_PIPE)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal() | k::soft_cap(30));
#elif defined(ATTENTION_ROW_MAP_AND)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal(4, 4) & k::soft_cap(30));
#elif defined(SOFT_CAP_OF_VALUES)
  return k::cpu::softmax(cx, in | k::soft_cap(30), out, n, n);
#elif defined(ATTENTION_POINTER)
  return k::cpu::attention(cx, p, kv, out, shape, k::causal());
#elif defined(ATTENTION_KEYS)
  return k::cpu::attention(cx, in, in, out, shape, k::causal());
#elif defined(ATTENTION_TENSOR)
  return k::cpu::attention(cx, in, side, out, shape, k::causal());
#elif defined(KEYS_POINTERS)
  return k::cpu::attention(cx, in, k::dense_kv(p, p, n), out, shape, k::causal());
#elif defined(RAGGED_POINTERS)
  return k::cpu::attention(cx, in, k::ragged_kv(side, halves, ids), out, shape, k::causal());
#elif defined(PAGED_SOURCES)
  return k::cpu::attention(cx, in, k::paged_kv(in, in, k::pages(ids, 1, 1), n), out, shape, k::causal());
#elif defined(KEYS_SCALE)
  return k::cpu::attention(cx, in, k::dense_kv(side.scale(0.5f), side, n), out, shape, k::causal());
#elif defined(KEYS_SCALES)
  return k::cpu::attention(cx, in, k::dense_kv(side, side.scales(1, 0, 0, 1), n), out, shape, k::causal());
#elif defined(KEYS_HEAD_SCALES)
  return k::cpu::attention(cx, in, k::dense_kv(side.head_scales(0.5), side, n), out, shape, k::causal());
#elif defined(ATTENTION_SCALE)
  return k::cpu::attention(cx, in, kv, out, shape, k::causal(), 0.1);
#elif defined(ATTENTION_SOURCE_LAST)
  return k::cpu::attention(cx, in, kv, in, shape, k::causal());
#elif defined(MERGE_POINTER)
  return k::cpu::merge_states(cx, in, p, out, {2, n, 1, 64});
#elif defined(SAMPLE_POINTER)
  return k::cpu::sample(cx, p, tokens, 1, n);
#elif defined(SAMPLE_MAP)
  return k::cpu::sample(cx, k::scale(2), tokens, 1, n);
#elif defined(SAMPLE_TEE)
  return k::cpu::sample(cx, in | k::tee(y, n), tokens, 1, n);
#elif defined(SAMPLE_TEMPERATURE)
  return k::cpu::sample(cx, in, tokens, n, n, 0.8);
#elif defined(SAMPLE_FLOATS)
  return k::cpu::sample(cx, in, y, 1, n);
#elif defined(VERIFY_SINK)
  return k::cpu::verify(cx, out, k::drafts(ids, 1), tokens, tokens, {1, 1, n});
#elif defined(LOG_PROBS_WEIGHTS)
  return k::cpu::log_probs(cx, k::gated(in, in), 1, n, k::LogProbs{}.of(ids, y));
#else
  KERNELS_TRY(k::cpu::attention(cx, in, kv, out, shape, k::no_mask() & Own{}));
  KERNELS_TRY(k::cpu::decode(cx, in, kv, out, shape, k::no_mask(), {}));
  KERNELS_TRY(k::cpu::decode(cx, in, kv, out, shape, k::no_mask(), {}, {}));
  KERNELS_TRY(k::cpu::attention(cx, in, kv, out, shape, k::no_mask(), {}, {}));
  KERNELS_TRY(k::cpu::matmul(cx, in, k::gated(in, in), k::swiglu() | out, product));
  return k::cpu::softmax(cx, in, quantize, n, n);
#endif
}
