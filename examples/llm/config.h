// What a model computes: config.json in one form for all architectures. The fields decide. The name of the architecture
// (model_type) only says which fields there are, what a missing one means, and how tensors are called.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "device/ops.h"
#include "text.h"

namespace llm {

struct RopeConfig {
  std::string type = "default";                    // default, linear, dynamic, llama3, yarn, longrope
  double theta = 10000, factor = 1, original = 0;  // original: positions that the model was trained for before scaling
  double low = 1, high = 4;                        // llama3
  double fast = 32, slow = 1;                      // yarn
  bool truncate = true;
  float amplitude = 1;                              // of sines and cosines
  std::vector<double> short_factors, long_factors;  // longrope
  int64_t positions = 0;                            // dynamic: for longer texts the base grows

  // rotary_dim / 2 frequencies, for texts of `length` tokens.
  std::vector<float> frequencies(int rotary_dim, int64_t length) const;
  // Whether keys that were rotated for texts of `from` tokens are wrong in a text of `to` tokens (longrope).
  bool differs(int64_t from, int64_t to) const;
};

struct LayerConfig {
  int64_t window = 0;  // keys that a query sees, its own included; 0: all
  int rope = 0;        // index in Config::ropes
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
  std::vector<std::string> unread;  // fields that are not known here

  Heads shape() const { return {heads, kv_heads, head_dim}; }
  // Whether angles depend on the length of the text. Then steps cannot be queued ahead.
  bool lengths_matter() const {
    return std::any_of(ropes.begin(), ropes.end(),
                       [](const RopeConfig& rope) { return rope.type == "dynamic" || rope.type == "longrope"; });
  }
  // Whether keys of a text of `from` tokens are wrong when it has `to` tokens. Then all of it has to be read again.
  bool stale(int64_t from, int64_t to) const {
    return std::any_of(ropes.begin(), ropes.end(), [&](const RopeConfig& rope) { return rope.differs(from, to); });
  }
};

// Refuses by name what this program cannot compute.
Config read_config(const Json& json);

}  // namespace llm
