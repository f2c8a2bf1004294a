// A transformer on a device: weights, KV cache, and the order of the calls.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "config.h"
#include "device/device.h"
#include "weights.h"

namespace llm {

struct ModelOptions {
  int weights = -1;       // a Type, or -1: the stored one, if the device has it
  int inputs = -1;        // of products of many rows: the Type of the weights, or -1: that of the activations
  int cache = -1;         // of keys and values: a Type, or -1: that of the embedding, or else fp16
  int64_t sequences = 1;  // texts that are decoded together
  int64_t context = 0;    // tokens of each; 0: as many as the model was trained for and as there is room for
  int64_t page = 0;       // positions in a page of the cache; 0: one page for each text
  int64_t chunk = 0;      // tokens of a prompt that are computed together; 0: the device's choice
  // -1: a text ends when it fills the context. Otherwise it goes on, and of its keys the first `sinks` and the last
  // ones are kept.
  int64_t sinks = -1;
  int64_t guesses = 0;           // that a step reads at most beside the last token of a single text
  bool batch_invariant = false;  // the bits of a text do not depend on how many others are decoded with it
};

constexpr int64_t kMostTexts = 4096;  // that can be decoded together
constexpr int64_t kRing = 64;         // the device may be this many tokens of a text ahead of the host

// The memory plan, in bytes.
struct Plan {
  size_t mapped = 0, weights = 0, cache = 0, activations = 0;  // mapped: weights used in mapped files
  int64_t context = 0;
  size_t free = 0;  // when the plan was made
  // How many matrices are converted at load because the device does not have the type of the file.
  std::map<std::pair<Type, Type>, int64_t> changed;  // from, to

  size_t total() const { return weights + cache + activations; }
  bool is_tight() const { return mapped > 0 && mapped + total() > free; }
  std::string changes() const;  // a line about converted matrices and tight memory, or an empty string
};

class Model {
 public:
  using Progress = std::function<void(double share)>;

  // Checks everything against the files. Allocates nothing.
  static Plan plan(const Config& config, const Weights& files, Device& device, const ModelOptions& options);
  Model(const Config& config, const Weights& files, Device& device, const ModelOptions& options,
        const Progress& progress = {}, bool only_plan = false);

  const Plan& plan() const { return plan_; }
  int64_t context() const { return plan_.context; }
  int64_t chunk() const { return options_.chunk; }  // tokens of a prompt that are computed together

  // Reads tokens [from, from + n) of a text whose earlier tokens are in the cache. Afterwards the logits of the last
  // token are in logits(0); with `each`, that function gets the logits of every token, in order. A GPU may be behind
  // what `progress` is told, by chunk() tokens at most.
  using Each = std::function<void(int64_t token, const float* logits)>;
  void read(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Progress& progress = {},
            const Each& each = {});

  // Generating: begin() sets up a text, read() reads its prompt, choose_next() samples its next token. Each step() then
  // reads the last token of all texts and samples the next one. Sampling is on the device, and step() does not wait;
  // token(text, n) waits for token n.
  void begin(int64_t text, const std::vector<int32_t>& ids, const Choice& how, int64_t tokens, uint64_t seed);
  void choose_next(int64_t text, int64_t texts = 1);
  void step(int64_t longest);  // longest: the length of the longest text, including the token that this step reads
  // Speculation: the same for a single text of this many tokens, with guesses of those that follow. Samples as many
  // tokens as are guessed right from the first guess on, and one more: the tokens that as many calls of step() would
  // give, unless angles depend on the length of the text.
  void step(int64_t length, int32_t last, const std::vector<int32_t>& guesses);
  int32_t token(int64_t text, int64_t n);
  const float* logits(int64_t row);  // on the host

  // Whether a step of one text is one launch (walk.cu).
  bool walks() const { return walk_calls_ != nullptr; }
  // The types of weights, of products' inputs and of the cache.
  Type weights_type() const { return layers_[0].qkv.q.type; }
  Type inputs_type() const { return options_.inputs >= 0 ? Type(options_.inputs) : device_.rows().activations; }
  Type cache_type() const { return cache_type_; }
  // The bytes of weights that a token reads.
  size_t weight_bytes() const { return weights_per_token_; }
  // Multiplications by weights for a prompt of so many tokens, of which the head reads only the last one.
  double multiplications(int64_t tokens) const;
  // The bytes of keys and values of a token.
  size_t key_bytes() const;

 private:
  struct Layer {
    Norm attention_norm, mlp_norm, after_attention, after_mlp, q_norm, k_norm;
    QkvWeights qkv;
    Matrix output, gate, up, down;
    Matrix router, expert_gate, expert_up, expert_down,
        shared_gate;  // with experts, gate, up and down are those of the shared expert
    const float *output_bias, *up_bias, *down_bias;
    Buffer<char> keys, values;
    Buffer<float> key_scales, value_scales;
  };
  class Loader;

  void check_options();
  size_t workspace_bytes() const;
  size_t decoded_bytes() const;
  void plan_memory();
  std::string helps() const;
  void allocate(bool only_plan);
  void check_text(int64_t text, int64_t from, int64_t n) const;  // that the text has room for tokens [from, from + n)
  void set_length(int64_t length);
  void plan_walk();
  Inputs normed(const Norm& norm, const Matrix& w, int64_t rows);
  bool in_codes(const Matrix& w, int64_t rows) const {
    return options_.inputs == int(w.type) && rows >= kManyRows && w.cols % 16 == 0;  // 16 bytes are copied at a time
  }
  Inputs encoded(const Inputs& y, const Matrix& w, int64_t rows);
  void replay(int64_t guesses, int64_t longest, const std::function<void()>& calls);
  void experts(const Layer& layer, int64_t rows);
  void layers(const Tokens& tokens, const Progress& progress = {});
  void head(int64_t first, int64_t rows);
  void check(const char* why) const {
    if (why != nullptr) throw Error(why);
  }
  const ProductCalls& products(const Matrix& w) const { return *device_.products(w.type); }
  Cache cache_of(const Layer& layer) const;

  Config config_;
  Device& device_;
  Place place_;
  ModelOptions options_;
  Plan plan_;
  Type cache_type_ = Type::f16;
  std::vector<Layer> layers_;
  Matrix embedding_, places_, head_;
  Norm last_norm_;
  const float* zeros_ = nullptr;      // the bias of products that have none
  std::vector<Buffer<char>> memory_;  // weights
  size_t weights_per_token_ = 0, weights_count_ = 0;

  // Activations. x: the residual stream. y: normalized rows. q, o: queries and outputs of attention. h: the inner rows
  // of a feed-forward layer. t: sums before a norm. codes: quantized rows of y, o or h for the next product. owners:
  // zeros, because the rows of a prompt all belong to one text.
  Buffer<int32_t> ids_, positions_, owners_, lengths_, table_;
  Buffer<float> frequencies_[2], x_, raw_, t_, logits_;
  Buffer<char> y_, q_, o_, h_, room_, decoded_, codes_;
  std::vector<float> frequencies_now_[2], host_logits_;
  Rope ropes_[2];
  std::vector<std::function<void()>> decode_;  // captured steps, with 0 guesses, 1, ...
  int64_t recorded_for_ = 0;                   // for texts of up to this many tokens
  const WalkCalls* walk_calls_ = nullptr;      // null: steps of this model are separate calls
  Walk walk_;
  Buffer<WalkLayer> walk_layers_;
  Buffer<char> walk_room_;
  Buffer<int32_t> expert_ids_, offsets_, order_, places_by_expert_;
  Buffer<float> router_logits_, shares_, made_;
  Experts experts_;
  Buffer<int32_t> last_ids_, last_positions_, last_lengths_, last_kept_, chosen_, history_;
  Buffer<uint64_t> seeds_, steps_, out_;
  Texts texts_;                      // points to the buffers above
  Buffer<float> given_;              // Guesses: written by the host,
  Buffer<int32_t> guessed_;          // and by the device
  Buffer<uint64_t> guessed_seeds_;
  Choice choice_;
  int64_t tokens_ = 0;
  int64_t page_ = 0, rows_ = 0, logit_rows_ = 0;
  int64_t text_ = 0;  // the first of the texts that the calls work on
};

}  // namespace llm
