// A transformer that is running: weights, a cache of keys and values, and the order of the calls.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "device/device.h"
#include "weights.h"

namespace llm {

struct ModelOptions {
  int weights = -1;       // a Type, or -1: as they are stored, where the device has that type
  int inputs = -1;        // of products of many rows: that of the weights, or -1: that of the activations
  int cache = -1;         // likewise; -1: that of the embedding, or fp16
  int64_t sequences = 1;  // decoded together
  int64_t context = 0;    // tokens of each; 0: as many as the model was trained for and as there is room for
  int64_t page = 0;       // positions in a page of the cache; 0: one page to a sequence
  int64_t chunk = 0;      // tokens of a prompt that are computed together; 0: as many as the device is quick with
  int64_t sinks =
      -1;  // texts that fill the context go on: so many first tokens are kept, and of the others the last; -1: they end
  int64_t guesses = 0;  // at most, that a step reads with the last token of a single sequence
  bool batch_invariant = false;  // the bits of a text do not depend on how many others are decoded with it
};

constexpr int64_t kMostTexts = 4096;  // that are decoded together
constexpr int64_t kRing = 64;         // tokens of a text that the host may be behind

// What takes memory, in bytes.
struct Plan {
  size_t mapped = 0, weights = 0, cache = 0, activations = 0;  // mapped: used where the files are mapped, not allocated
  int64_t context = 0;
  size_t free = 0;  // when the plan was made
  // Matrices that become another type when they are loaded, because the device does not have the one of the file.
  std::map<std::pair<Type, Type>, int64_t> changed;  // from, to

  size_t total() const { return weights + cache + activations; }
  bool is_tight() const { return mapped > 0 && mapped + total() > free; }
  std::string changes() const;  // what there is to say of the weights, in a line, or nothing
};

class Model {
 public:
  using Progress = std::function<void(double share)>;

  // Checks everything against the files, and allocates nothing.
  static Plan plan(const Config& config, const Weights& files, Device& device, const ModelOptions& options);
  Model(const Config& config, const Weights& files, Device& device, const ModelOptions& options,
        const Progress& progress = {}, bool only_plan = false);

  const Plan& plan() const { return plan_; }
  int64_t context() const { return plan_.context; }
  int64_t chunk() const { return options_.chunk; }  // tokens of a prompt that are computed together

  // Tokens [from, from + n) of a text, whose tokens before are in the cache; then the logits of the last one are there,
  // or `each` has got the logits of each of them, in order. A GPU may have less behind it than `progress` is told, but
  // by no more than chunk().
  using Each = std::function<void(int64_t token, const float* logits)>;
  void read(int64_t text, int64_t from, const int32_t* ids, int64_t n, const Progress& progress = {},
            const Each& each = {});

  // Writing: begin() says what a text is, read() has read all of it, choose_next() chooses its next token, and step()
  // reads that and chooses the one after it, for all texts at once. Tokens are chosen on the device, and step() does
  // not wait: token() does, for token n.
  void begin(int64_t text, const std::vector<int32_t>& ids, const Choice& how, int64_t tokens, uint64_t seed);
  void choose_next(int64_t text, int64_t texts = 1);
  void step(int64_t longest);  // longest: the tokens of the longest text, with those that this step reads
  // The same for a single text of so many tokens, and guesses of those that follow. As many tokens are chosen as are
  // guessed right from the first one on, and one more: those that step() chooses one after the other, unless
  // angles depend on the length of the text.
  void step(int64_t length, int32_t last, const std::vector<int32_t>& guesses);
  int32_t token(int64_t text, int64_t n);
  const float* logits(int64_t row);  // on the host

  // Whether a step of one text is one launch (walk.cu).
  bool walks() const { return walk_calls_ != nullptr; }
  // What products multiply, and what the cache has.
  Type weights_type() const { return layers_[0].qkv.q.type; }
  Type inputs_type() const { return options_.inputs >= 0 ? Type(options_.inputs) : device_.rows().activations; }
  Type cache_type() const { return cache_type_; }
  // The bytes of weights that a token reads.
  size_t weight_bytes() const { return weights_per_token_; }
  // Multiplications by weights while a prompt of so many tokens is read: the head takes only the last one.
  double multiplications(int64_t tokens) const;
  // The bytes of keys and values that a token has.
  size_t key_bytes() const;

 private:
  struct Layer {
    Norm attention_norm, mlp_norm, after_attention, after_mlp, q_norm, k_norm;
    QkvWeights qkv;
    Matrix output, gate, up, down;
    Matrix router, expert_gate, expert_up, expert_down,
        shared_gate;  // gate, up and down are then those of the shared expert
    const float *output_bias, *up_bias, *down_bias;
    Buffer<char> keys, values;
    Buffer<float> key_scales, value_scales;
  };
  class Loader;
  class Tensors;

  int64_t inside() const;
  void check_options();
  size_t workspace_bytes() const;
  size_t decoded_bytes() const;
  size_t code_bytes() const;
  void plan_memory();
  std::string helps() const;
  void allocate(bool only_plan);
  void check_text(int64_t text, int64_t from, int64_t n) const;  // that such a text has so many tokens behind `from`
  void set_length(int64_t length);
  void plan_walk();
  Inputs normed(const Norm& norm, const Matrix& w, int64_t rows);
  bool in_codes(const Matrix& w, int64_t rows) const {
    return options_.inputs == int(w.type) && rows >= kManyRows && w.cols % 16 == 0;  // as tensor cores copy them
  }
  Inputs encoded(const Inputs& y, const Matrix& w, int64_t rows);
  void replay(int64_t guesses, int64_t longest, const std::function<void()>& calls);
  void experts(const Layer& layer, int64_t rows);
  void layers(const Tokens& tokens, const Progress& progress = {});
  void walk(const Tokens& tokens);
  void head(int64_t first, int64_t rows);
  void check(const char* why) const {
    if (why != nullptr) throw Error(why);
  }
  const ProductCalls& products(const Matrix& w) const { return *device_.products(w.type); }
  Cache cache_of(const Layer& layer) const;

  Config config_;
  Device& device_;
  Place place_;  // where calls run, and what they should know of this model
  ModelOptions options_;
  Plan plan_;
  Type cache_type_ = Type::f16;
  std::vector<Layer> layers_;
  Matrix embedding_, places_, head_;
  Norm last_norm_;
  const float* zeros_ = nullptr;      // biases of products that have none
  std::vector<Buffer<char>> memory_;  // weights
  size_t weights_per_token_ = 0, weights_count_ = 0;

  // Activations: x is the residual stream; y normalized; q, o of attention; h inside of a feed-forward layer; t sums
  // before a norm; codes of the y, o or h that the next product reads.
  // owners: zeros, as a prompt's rows are all of one text.
  Buffer<int32_t> ids_, positions_, owners_, lengths_, table_;
  Buffer<float> frequencies_[2], x_, raw_, t_, logits_;
  Buffer<char> y_, q_, o_, h_, room_, decoded_, codes_;
  std::vector<float> frequencies_now_[2], host_logits_;
  Rope ropes_[2];
  std::vector<std::function<void()>> decode_;  // steps that are recorded, with 0 guesses, 1, ...
  int64_t recorded_for_ = 0;                   // lengths up to this
  const WalkCalls* walk_calls_ = nullptr;      // for steps of one text, if there are such calls for this model
  Walk walk_;
  Buffer<WalkLayer> walk_layers_;
  Buffer<char> walk_room_;
  Buffer<int32_t> expert_ids_, offsets_, order_, places_by_expert_;
  Buffer<float> router_logits_, shares_, made_;
  Experts experts_;
  Buffer<int32_t> last_ids_, last_positions_, last_lengths_, last_kept_, chosen_, history_;
  Buffer<uint64_t> seeds_, steps_, out_;
  Texts texts_;                      // that are being written
  Buffer<int32_t> given_, guessed_;  // by the host, and what Guesses has
  Buffer<uint64_t> guessed_seeds_;
  Choice choice_;
  int64_t tokens_ = 0;
  int64_t page_ = 0, rows_ = 0, logit_rows_ = 0;
  int64_t text_ = 0;  // the first one of those that are read
};

}  // namespace llm
