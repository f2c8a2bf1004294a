// Small things that all files of the program need: errors of one line, JSON that is not trusted, whole files.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace llm {

// Ends the program with exit code 1 and this line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a file says about itself must not be able to garble the terminal: control characters become '?'.
inline std::string shown(std::string text, size_t most = 100) {
  if (text.size() > most) text = text.substr(0, most) + "...";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  }
  return text;
}

using Json = nlohmann::json;

// Deeper than anything that is meant seriously.
constexpr int kDeepest = 64;

inline Json parse_json(const std::string& text, const std::string& what) {
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kDeepest) throw Error(what + ": JSON is nested more than " + std::to_string(kDeepest) + " deep");
    return true;
  };
  try {
    return Json::parse(text, shallow);
  } catch (const Json::exception& e) {
    throw Error(what + ": not JSON: " + shown(e.what(), 160));
  }
}

inline bool file_exists(const std::string& path) { return std::ifstream(path).good(); }

inline std::string read_file(const std::string& path, size_t most = size_t(1) << 30) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot open " + path);
  file.seekg(0, std::ios::end);
  const auto size = file.tellg();
  if (size < 0) throw Error("cannot read " + path);
  if (uint64_t(size) > most) throw Error(path + ": " + std::to_string(uint64_t(size)) + " bytes are more than such a file may have");
  file.seekg(0);
  std::string text(size_t(size), '\0');
  file.read(&text[0], size);
  if (!file) throw Error("cannot read " + path);
  return text;
}

inline Json read_json(const std::string& path) { return parse_json(read_file(path), path); }

}  // namespace llm
