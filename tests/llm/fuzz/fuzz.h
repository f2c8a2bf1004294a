// What the files of a model may say. An input is a letter that says which file it is, and its bytes:
//   c  config.json      s  .safetensors      t  tokenizer.json      m  tokenizer.model
//   d  a whole directory: {"config", "tensors", "generation", "tokenizer_config"}, tensors as in examples/llm/golden
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace fuzz {

// Reads the file and uses what it says. It is either read or refused by llm::Error, in one line; anything else ends the
// program.
void read(const std::string& input);

// The input with a few changes: of JSON's values, of bytes, or both.
std::string mutate(const std::string& input, uint64_t& state);

uint64_t random_bits(uint64_t& state);

// What the golden files in a folder hold, as inputs by name.
std::map<std::string, std::string> seeds(const std::string& golden);

}  // namespace fuzz
