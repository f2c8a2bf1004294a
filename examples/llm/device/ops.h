// The calls that a model is made of, as tables of function pointers with types erased. So the model is compiled once,
// and each call once for each type of weights, instruction set and device. rows.inl, products.inl and attend.inl
// implement them, a few lines each. The CPU (cpu.cpp) and the GPU (gpu.cu) share these files and differ in what `on::`
// is: kernels::cpu or kernels.
//
// Plain types only: these structs mean the same in files that are compiled for different instruction sets. All pointers
// are device pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llm {

// f8 (e4m3) and i8: a scale for each row. i4: a scale for each 32 columns.
enum class Type : uint8_t { f32, f16, bf16, f8, i8, i4 };
constexpr int kTypes = 6, kGroup = 32;
// --inputs quantizes the inputs of products with at least this many rows. A product with 14336 x 4096 weights of int8
// and e4m3 takes an H200, with 128 rows, 22 and 23 us with inputs of 8 bits and 35 and 34 us with 16 bits; with 64 rows
// 20 and 20 against 24 and 22, and quantizing comes on top (bench/results/h200: e4m3_row and int8_row in matmul.json
// and matmul_in_eight.json).
constexpr int64_t kManyRows = 128;
constexpr int kInvariantParts = 16;  // into which --batch-invariant splits the keys of each text (split-KV)
// With up to this many queries of each sequence, keys are split among all threads or blocks: always in decode(), and in
// attention() of a prompt's chunk where that is faster.
constexpr int kFewQueries = 8, kChunkQueries = 512;

inline const char* name_of(Type type) {
  constexpr const char* names[] = {"fp32", "fp16", "bf16", "fp8", "int8", "int4"};
  return names[int(type)];
}
constexpr int bits_of(Type type) {
  constexpr int bits[] = {32, 16, 16, 8, 8, 4};
  return bits[int(type)];
}

// Where calls run, and what they should know about the model.
struct Place {
  int threads = 1;         // CPU threads, which also convert weights for a GPU
  void* stream = nullptr;  // cudaStream_t
  bool early = false;      // programmatic dependent launch: kernels prefetch weights while the one before runs
  bool wide = false;       // weights have 16 bits or more
  bool invariant = false;  // the bits of a text do not depend on how many other texts there are
  void* room = nullptr;    // where products of many rows dequantize their weights to 16 bits; may be null
  size_t room_bytes = 0;
};

// Weights, one row for each output. scales: a float for each row (f8, i8), a half for each group of kGroup columns
// (i4).
struct Matrix {
  const void* data = nullptr;
  const void* scales = nullptr;
  int64_t rows = 0, cols = 0;
  Type type = Type::f32;

  explicit operator bool() const { return data != nullptr; }
};

struct Norm {
  const float* gamma = nullptr;  // includes the 1 that Gemma's files leave out
  const float* beta = nullptr;   // of LayerNorm
  float eps = 0;
  bool layer_norm = false;

  explicit operator bool() const { return gamma != nullptr; }
};

struct Rope {
  const float* frequencies = nullptr;
  int rotary_dim = 0;
  float amplitude = 1;
};

enum class Activation : uint8_t { silu, gelu_tanh };

// The rows of a call: `each` tokens of each sequence, one sequence after the other.
struct Tokens {
  int64_t sequences = 0, each = 0;
  const int32_t* ids = nullptr;
  const int32_t* positions = nullptr;  // of each row in its sequence
  const int32_t* owners = nullptr;     // the sequence of each row
  const int32_t* lengths = nullptr;    // of each sequence, including these tokens
  int64_t longest = 0;                 // an upper bound of the lengths, known to the host
  const int32_t* kept = nullptr;       // of each sequence, how many keys the cache has; null: as many as `lengths`

  int64_t rows() const { return sequences * each; }
};

// Keys and values of one layer, in pages: page i of sequence s is page table[s * pages + i]. A dense cache has one page
// for each sequence.
struct Cache {
  Type type = Type::f16;
  void* keys = nullptr;
  void* values = nullptr;
  const int32_t* table = nullptr;
  int64_t pages = 0, page = 0;  // pages in a row of the table; positions in a page
  float *key_scales = nullptr, *value_scales = nullptr;  // int8: one for each position and head
  // A ring of this many positions: the first `sinks` stay, and in the others a new key replaces the oldest. 0: no ring.
  int64_t ring = 0, sinks = 0;
};

struct Heads {
  int64_t heads = 0, kv_heads = 0, dim = 0;
};

struct Attend {
  Heads shape;
  int64_t window = 0;  // a query sees this many keys, its own included; 0: all
  float scale = 1, cap = 0;
};

// The left operand of a product: normalized rows of activations; or float rows and the norm that the product applies to
// them; or quantized rows in the weights' type, with a scale for each row.
struct Inputs {
  const void* rows = nullptr;
  const Norm* norm = nullptr;
  const float* scales = nullptr;
};

// The projections of queries, keys and values.
struct QkvWeights {
  Matrix q, k, v;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
};

// Which experts each row goes to, and the rows sorted by expert (kernels/router.h).
struct Experts {
  int64_t count = 0, per_token = 0;
  bool shares_add_to_one = false;
  int32_t *ids = nullptr, *offsets = nullptr, *order = nullptr, *places = nullptr;
  float *logits = nullptr, *shares = nullptr;
};

// How the next token is sampled (kernels/sampling.h says what these mean).
struct Choice {
  float temperature = 0, top_p = 1, min_p = 0, repetition_penalty = 1;
  int32_t top_k = 0;
};

// The texts that are being generated, on the device: the state that a step reads, and writes for the next step.
struct Texts {
  // Of each text: its last token, the position of that token, and how many tokens the text has.
  int32_t *ids = nullptr, *positions = nullptr, *lengths = nullptr;
  int32_t* kept = nullptr;     // how many of them have keys in the cache
  int32_t* chosen = nullptr;   // the tokens just sampled
  int32_t* history = nullptr;  // all tokens of each text, or the last `context` in a ring; texts are `context` apart
  uint64_t *seeds = nullptr, *steps = nullptr;
  // Where the host reads sampled tokens: token n of text s is at out[n % ring * sequences + s], as n << 32 | token.
  uint64_t* out = nullptr;
  int64_t sequences = 0, context = 0, ring = 0;
  bool endless = false;  // texts continue when the context is full
};

// Speculation, for a single text: its last token and guesses of the tokens that follow. On the device.
struct Guesses {
  const float* given = nullptr;  // the last token and the guesses
  int64_t rows = 0;              // how many these are
  // For each of them: the token, its position, the length of the text with it, and the seed and step with which the
  // token after it is sampled.
  int32_t *ids = nullptr, *positions = nullptr, *lengths = nullptr;
  uint64_t *seeds = nullptr, *steps = nullptr;
};

// Calls for rows. Every call of these tables returns null, or the reason why it failed. Activations (y, q, o, h) have
// the type `activations`; the residual stream (x), sums (t) and logits are float.
struct RowCalls {
  const char* name;  // of the instruction set, or of the type of activations
  unsigned needs;    // features that the machine must have
  Type activations;
  // x = the tokens' rows of a table, times a factor, plus the rows of their positions in `places`, if there is one.
  const char* (*embed)(const Place&, const Tokens&, const Matrix& table, float factor, const Matrix& places, float* x);
  // norm: y = norm(x). add_norm: x += norm(t).
  const char* (*norm)(const Place&, const float* x, const Norm&, void* y, int64_t rows, int64_t cols);
  const char* (*add_norm)(const Place&, const float* t, const Norm&, float* x, int64_t rows, int64_t cols);
  // Quantizes y, or norm(y) if it comes with an RMSNorm, to int8 or fp8 with a scale for each row.
  const char* (*encode)(const Place&, const Inputs& y, Type type, void* codes, float* scales, int64_t rows,
                        int64_t cols);
  // From what three() has stored: normalizes the heads of queries and keys, if there are norms, rotates them, and
  // appends keys and values to the cache.
  const char* (*rotate)(const Place&, const Tokens&, const Heads&, float* raw, const Norm& q_norm, const Norm& k_norm,
                        const Rope&, const Cache&, void* queries);
  // Reads `bytes` bytes, a multiple of 4096, to measure the bandwidth of memory.
  const char* (*read_all)(const Place&, const void* from, size_t bytes, uint32_t* out);
  // Routes rows to experts by the router's logits, and sorts the rows by expert.
  const char* (*route)(const Place&, const Experts&, int64_t rows);
  // combine: x += the results of each row's experts, weighted by their shares. add_gated: x += sigmoid(gate) * t, for
  // the shared expert.
  const char* (*combine)(const Place&, const Experts&, const float* made, float* x, int64_t rows, int64_t cols);
  const char* (*add_gated)(const Place&, const float* gate, const float* t, float* x, int64_t rows, int64_t cols);
  // t = cap * tanh(t / cap)
  const char* (*cap)(const Place&, float* t, float cap, int64_t rows, int64_t cols);
  // Samples a token for `count` texts from number `first` on, from their logits of the first `tokens` tokens, and
  // appends it to the texts.
  const char* (*choose)(const Place&, const Choice&, const float* logits, int64_t vocabulary, int64_t tokens,
                        const Texts&, int64_t first, int64_t count);
  // guess: appends the guesses to the text. verify: samples a token for each row, and appends the right guesses and one
  // token more.
  const char* (*guess)(const Place&, const Texts&, const Guesses&);
  const char* (*verify)(const Place&, const Choice&, const float* logits, int64_t vocabulary, int64_t tokens,
                        const Texts&, const Guesses&);
};

struct AttendCalls {
  Type cache;
  size_t (*bytes)(const Place&, const Tokens&, const Heads&);
  const char* (*attend)(const Place&, const Tokens&, const Attend&, const void* q, const Cache&, void* o, void* room,
                        size_t bytes);
};

struct ProductCalls {
  Type weights;
  // Whether qkv() is compiled for a cache of this type. Otherwise three() and rotate() do the same.
  bool (*makes)(Type cache);
  // Whether qkv() and up() of a single row can apply the RMSNorm themselves, which saves a launch.
  bool folds;
  int64_t decodes_from;  // from this many rows on, products gain by dequantizing to Place::room; 0: never
  bool (*takes_codes)(const Place&);  // whether inputs may be quantized (on a GPU: if it multiplies them in 8 bits)
  const char* (*qkv)(const Place&, const Tokens&, const Heads&, const Inputs& y, const QkvWeights&, const Rope&,
                     const Cache&, void* q);
  // Queries, keys and values as the product gives them, side by side in floats.
  const char* (*three)(const Place&, const Inputs& y, const QkvWeights&, float* raw, int64_t rows);
  // plain: t = y w^T + bias. residual: x += y w^T + bias.
  const char* (*plain)(const Place&, const Inputs& y, const Matrix& w, const float* bias, float* t, int64_t rows);
  const char* (*residual)(const Place&, const Inputs& y, const Matrix& w, const float* bias, float* x, int64_t rows);
  // h = activation(y gate^T) * (y up^T), or without a gate h = activation(y up^T + bias).
  const char* (*up)(const Place&, Activation, const Inputs& y, const Matrix& gate, const Matrix& up, const float* bias,
                    void* h, int64_t rows);
  // The same for experts: a matrix holds those of all experts one below the other, and results are sorted by expert.
  const char* (*expert_up)(const Place&, const Experts&, const void* y, const Matrix& gate, const Matrix& up, void* h,
                           int64_t rows);
  const char* (*expert_down)(const Place&, const Experts&, const void* h, const Matrix& down, const float* zeros,
                             float* made, int64_t rows);
};

// A step of one text in one launch (walk.cu): all layers, and the head after them.
struct WalkLayer {
  QkvWeights qkv;
  Matrix output, gate, up, down;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm, k_norm: of heads, or null
  void *keys, *values;
  int rope;
  int64_t window;
};
struct Walk {
  const WalkLayer* layers;  // on the device
  int64_t count, hidden, inner, vocabulary;
  Heads shape;
  Type cache;
  Activation activation;
  bool head_norms;
  float eps, score_scale;
  Rope ropes[2];
  Matrix embedding, head;  // an empty head: the launch ends with x, and the head is a call of its own
  float embedding_scale;
  const float* last_norm;
  float *x, *logits;
  void* room;  // of bytes(): where blocks exchange results
};

struct WalkCalls {
  Type weights;
  // The size of `room`, which must be zeroed once; 0: this kernel does not take a model of this shape on this GPU.
  size_t (*bytes)(const Walk&);
  // Before the first step: writes the tensor maps of all weights to `room`. layers: a copy on the host.
  const char* (*begin)(const Place&, const Walk&, const WalkLayer* layers);
  // From the last token to the logits, or to x. cache: of any layer; keys and values are taken from each WalkLayer.
  const char* (*walk)(const Place&, const Walk&, const Tokens&, const Cache&);
};

}  // namespace llm
