// What a layer is made of: the calls of the library that a model needs, with types erased, so that the model is
// compiled once and each call once for each type of weights, instruction set and device. rows.inl and products.inl have
// them, a few lines each; they are the same for the CPU (cpu.cpp) and the GPU (gpu.cu), which differ in what `on::` is:
// kernels::cpu or kernels.
//
// Plain types only: these structs mean the same in files with different instruction sets. Pointers are those of the
// device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llm {

enum class Type : uint8_t {
  f32,
  f16,
  bf16,
  f8,
  i8,
  i4
};  // f8: e4m3. i8: a scale for each row. i4: one for each 32 columns.
constexpr int kTypes = 6, kGroup = 32;
// From so many rows on inputs become codes of 8 bits with --inputs: 14336 x 4096 times codes of int8 and of e4m3 takes
// an H200 22 and 23 us with 128 tokens, and times 16 bits 35 and 34; with 64 20 and 20, and 24 and 22, and the codes
// are made first (bench/results/h200, e4m3_row and int8_row in matmul.json and matmul_in_eight.json).
constexpr int64_t kManyRows = 128;
constexpr int kInvariantParts = 16;  // of the keys of a text that is to have the same bits beside any others
constexpr int kFewQueries = 8, kChunkQueries = 512;  // of each sequence, that share the keys out among all threads or
                                                     // blocks, as far as that is faster

inline const char* name_of(Type type) {
  constexpr const char* names[] = {"fp32", "fp16", "bf16", "fp8", "int8", "int4"};
  return names[int(type)];
}
constexpr int bits_of(Type type) {
  constexpr int bits[] = {32, 16, 16, 8, 8, 4};
  return bits[int(type)];
}

// Where calls run: threads of the CPU, which also convert weights for a GPU, or a stream (cudaStream_t).
struct Place {
  int threads = 1;
  void* stream = nullptr;
  bool early = false;  // kernels begin, and ask for their weights, while the one ahead of them is still running
  bool wide = false;   // weights have 16 bits or more
  bool invariant = false;  // the bits of a text do not depend on how many others there are
  void* room = nullptr;  // where products of many rows decode their weights to 16 bits, if there is room for these
  size_t room_bytes = 0;
};

// Weights: a row for each output. Scales: float for each row (f8, i8), half for each group of a row (i4).
struct Matrix {
  const void* data = nullptr;
  const void* scales = nullptr;
  int64_t rows = 0, cols = 0;
  Type type = Type::f32;

  explicit operator bool() const { return data != nullptr; }
};

struct Norm {
  const float* gamma = nullptr;  // with the 1 that Gemma leaves out
  const float* beta = nullptr;   // LayerNorm's
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

// The rows of a step: `each` tokens of each of so many sequences, one sequence after the other.
struct Tokens {
  int64_t sequences = 0, each = 0;
  const int32_t* ids = nullptr;
  const int32_t* positions = nullptr;  // of each row in its sequence
  const int32_t* owners = nullptr;     // the sequence of each row
  const int32_t* lengths = nullptr;    // of each sequence, these tokens included
  int64_t longest = 0;                 // which no length exceeds, as far as the host knows
  const int32_t* kept = nullptr;       // of each sequence, the keys that are in the cache, if not all are

  int64_t rows() const { return sequences * each; }
};

// Keys and values of one layer, in pages: page i of sequence s is page table[s * pages + i]. A dense cache has one page
// to a sequence.
struct Cache {
  Type type = Type::f16;
  void* keys = nullptr;
  void* values = nullptr;
  const int32_t* table = nullptr;
  int64_t pages = 0, page = 0;  // in a row of the table; positions in a page
  float *key_scales = nullptr, *value_scales = nullptr;  // int8: one for each position and head
  int64_t ring = 0,
          sinks =
              0;  // so many positions, of which the first ones stay and the others go around; 0: they end at the last
};

struct Heads {
  int64_t heads = 0, kv_heads = 0, dim = 0;
};

struct Attend {
  Heads shape;
  int64_t window = 0;  // the last so many keys, the query's own included; 0: all
  float scale = 1, cap = 0;
};

// What a product multiplies with its weights: normalized rows; or rows of floats and the norm that is still to be
// applied to them; or codes of the weights' type, with a scale for each row.
struct Inputs {
  const void* rows = nullptr;
  const Norm* norm = nullptr;
  const float* scales = nullptr;
};

// Queries, keys and values from normalized inputs, rotated and put where they belong.
struct QkvWeights {
  Matrix q, k, v;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
};

// Which experts the rows of a step go to, and their rows in the order of the experts (router.h of the library).
struct Experts {
  int64_t count = 0, per_token = 0;
  bool shares_add_to_one = false;
  int32_t *ids = nullptr, *offsets = nullptr, *order = nullptr, *places = nullptr;
  float *logits = nullptr, *shares = nullptr;
};

// How the next token is chosen (sampling.h has what these mean).
struct Choice {
  float temperature = 0, top_p = 1, min_p = 0, repetition_penalty = 1;
  int32_t top_k = 0;
};

// Texts that are being written, on the device: what a step reads, and writes for the next one.
struct Texts {
  int32_t *ids = nullptr, *positions = nullptr,
          *lengths = nullptr;  // the last token of each, its place, and how many there are
  int32_t* kept = nullptr;  // how many of these are in the cache
  int32_t* chosen = nullptr;
  int32_t* history = nullptr;  // all tokens of each, or the last ones in a ring, `context` apart
  uint64_t *seeds = nullptr, *steps = nullptr;
  // Where the host finds what was chosen: token n of text s at out[n % ring * sequences + s], as n << 32 | token.
  uint64_t* out = nullptr;
  int64_t sequences = 0, context = 0, ring = 0;
  bool endless = false;  // texts go on when the context is full
};

// Tokens that are read with the last one of a text that is written alone: guesses of what follows. On the device.
struct Guesses {
  const int32_t* given = nullptr;  // that last token, and the guesses
  int64_t rows = 0;                // of them
  // For each of these: how many tokens there are with it, its place, and the seed and the step of what is drawn behind
  // it.
  int32_t *ids = nullptr, *positions = nullptr, *lengths = nullptr;
  uint64_t *seeds = nullptr, *steps = nullptr;
};

// Each returns null, or why not. Activations (x, y, q, o, h) have the type that rows() says; residuals, sums and logits
// are float.
struct RowCalls {
  const char* name;  // of the instruction set
  unsigned needs;    // of the machine
  Type activations;
  // x = the rows of a table, times a factor, plus the rows of another one for their positions.
  const char* (*embed)(const Place&, const Tokens&, const Matrix& table, float factor, const Matrix& places, float* x);
  // y = norm(x), and x += norm(t).
  const char* (*norm)(const Place&, const float* x, const Norm&, void* y, int64_t rows, int64_t cols);
  const char* (*add_norm)(const Place&, const float* t, const Norm&, float* x, int64_t rows, int64_t cols);
  // y, or norm(y) where there is an RMSNorm with it, as codes of int8 or fp8.
  const char* (*encode)(const Place&, const Inputs& y, Type type, void* codes, float* scales, int64_t rows,
                        int64_t cols);
  // What three() made: the heads of queries and keys normalized, where there are norms, and rotated; keys and values go
  // to the cache.
  const char* (*rotate)(const Place&, const Tokens&, const Heads&, float* raw, const Norm& q_norm, const Norm& k_norm,
                        const Rope&, const Cache&, void* queries);
  // Reads so many bytes, a multiple of 4096, to measure how fast they come.
  const char* (*read_all)(const Place&, const void* from, size_t bytes, uint32_t* out);
  // From the router's logits.
  const char* (*route)(const Place&, const Experts&, int64_t rows);
  // x += what the experts of each row have made, by their shares; and x += sigmoid(gate) * t, for the expert that all
  // rows go to.
  const char* (*combine)(const Place&, const Experts&, const float* made, float* x, int64_t rows, int64_t cols);
  const char* (*add_gated)(const Place&, const float* gate, const float* t, float* x, int64_t rows, int64_t cols);
  // t = cap * tanh(t / cap)
  const char* (*cap)(const Place&, float* t, float cap, int64_t rows, int64_t cols);
  // Chooses from the logits of `count` texts from `first` on, the first of so many tokens, and puts what was chosen
  // behind the texts.
  const char* (*choose)(const Place&, const Choice&, const float* logits, int64_t vocabulary, int64_t tokens,
                        const Texts&, int64_t first, int64_t count);
  // Puts guesses behind the text; and chooses from the logits of all rows, and puts behind the text what was guessed
  // right and one token more.
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
  // Whether qkv() is compiled for a cache of this type; otherwise three() and rotate() do the same.
  bool (*makes)(Type cache);
  // Whether qkv() and up() of one row apply its RMSNorm themselves, which takes no longer than a call of its own, and
  // is one less.
  bool folds;
  int64_t decodes_from;  // so many rows products gain by Place::room; 0: never
  bool (*takes_codes)(const Place&);  // whether inputs may be codes: on a GPU where they are multiplied as they are
  const char* (*qkv)(const Place&, const Tokens&, const Heads&, const Inputs& y, const QkvWeights&, const Rope&,
                     const Cache&, void* q);
  // Queries, keys and values as they are, side by side in floats.
  const char* (*three)(const Place&, const Inputs& y, const QkvWeights&, float* raw, int64_t rows);
  // t = y w^T + bias, and x += y w^T + bias.
  const char* (*plain)(const Place&, const Inputs& y, const Matrix& w, const float* bias, float* t, int64_t rows);
  const char* (*residual)(const Place&, const Inputs& y, const Matrix& w, const float* bias, float* x, int64_t rows);
  // h = activation(y gate^T) * (y up^T), and h = activation(y up^T + bias) where there is no gate.
  const char* (*up)(const Place&, Activation, const Inputs& y, const Matrix& gate, const Matrix& up, const float* bias,
                    void* h, int64_t rows);
  // The same for experts: matrices of all of them one below the other, and results in the order of the experts.
  const char* (*expert_up)(const Place&, const Experts&, const void* y, const Matrix& gate, const Matrix& up, void* h,
                           int64_t rows);
  const char* (*expert_down)(const Place&, const Experts&, const void* h, const Matrix& down, const float* zeros,
                             float* made, int64_t rows);
};

// A step of one text in one launch (walk.cu): all layers, and the head behind them.
struct WalkLayer {
  QkvWeights qkv;
  Matrix output, gate, up, down;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the latter two of each head, where there are such
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
  Matrix embedding, head;  // no head: its product is a call of its own, from x
  float embedding_scale;
  const float* last_norm;
  float *x, *logits;
  void* room;  // bytes(): where blocks leave results for each other
};

struct WalkCalls {
  Type weights;
  // Bytes of `room`, zeroed once; 0: a model of this shape takes the other calls, on this GPU at least.
  size_t (*bytes)(const Walk&);
  // Puts into `room` where weights are, before the first step. The layers as the host has them.
  const char* (*begin)(const Place&, const Walk&, const WalkLayer* layers);
  // From the last token to the logits, or to x. The cache is a layer's, of which keys and values are those of each.
  const char* (*walk)(const Place&, const Walk&, const Tokens&, const Cache&);
};

}  // namespace llm
