// What a model computes: config.json in one form for all architectures. What its fields say decides; the name of the
// architecture (model_type) says which fields there are, what is meant where one is missing, and how the tensors are
// called.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "device/ops.h"
#include "text.h"

namespace llm {

class Fields;

struct RopeConfig {
  std::string type = "default";                    // default, linear, dynamic, llama3, yarn, longrope
  double theta = 10000, factor = 1, original = 0;  // original: positions that the model was trained for at first
  double low = 1, high = 4;                        // llama3
  double fast = 32, slow = 1;                      // yarn
  bool truncate = true;
  float amplitude = 1;                              // of sines and cosines
  std::vector<double> short_factors, long_factors;  // longrope
  int64_t positions = 0;                            // dynamic: beyond so many the base grows

  // rotary_dim / 2 of them, for sequences of so many tokens.
  std::vector<float> frequencies(int rotary_dim, int64_t length) const;
  // Whether they change on the way from one length to the other: then what longrope has made of keys before is no
  // longer right.
  bool differs(int64_t from, int64_t to) const;
};

struct LayerConfig {
  int64_t window = 0;  // keys that a query sees, itself included; 0: all
  int rope = 0;        // which of Config::ropes
  bool experts = false;
};

struct Config {
  std::string architecture;  // model_type
  int64_t vocabulary = 0, hidden = 0, inner = 0, heads = 0, kv_heads = 0, head_dim = 0, positions = 0;
  int rotary_dim = 0;
  Activation activation = Activation::silu;
  bool layer_norm = false, norm_plus_one = false, head_norms = false, post_norms = false, tied = false;
  bool learned_positions = false, qkv_bias = false, output_bias = false, fused = false;
  float eps = 1e-6f, embedding_scale = 1, score_scale = 0, score_cap = 0, logit_cap = 0;
  int64_t experts = 0, experts_per_token = 0, expert_inner = 0, shared_inner = 0;
  bool shares_add_to_one = false;
  std::vector<LayerConfig> layers;
  std::vector<RopeConfig> ropes;
  std::vector<int64_t> eos;
  std::vector<std::string> unread;  // fields that nothing here knows

  Heads shape() const { return {heads, kv_heads, head_dim}; }
  // Whether angles depend on the length of the text: then steps cannot be asked for ahead.
  bool lengths_matter() const {
    return std::any_of(ropes.begin(), ropes.end(),
                       [](const RopeConfig& rope) { return rope.type == "dynamic" || rope.type == "longrope"; });
  }
  // Whether keys that were made for texts of `from` tokens are wrong in one of `to`: then all has to be read anew.
  bool stale(int64_t from, int64_t to) const {
    return std::any_of(ropes.begin(), ropes.end(), [&](const RopeConfig& rope) { return rope.differs(from, to); });
  }
};

// Refuses by name what it cannot compute.
Config read_config(const Json& json);

// A token number or a list of them; what is missing or null gives none.
std::vector<int64_t> token_ids(const Fields& fields, const char* name);

}  // namespace llm
