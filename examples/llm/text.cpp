#include "text.h"

#include <fstream>

namespace llm {

namespace {

// Deeper than anything that is meant seriously.
constexpr int kDeepest = 64;

}  // namespace

Json parse_json(const std::string& text, const std::string& what) {
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

bool file_exists(const std::string& path) { return std::ifstream(path).good(); }

std::string read_file(const std::string& path, size_t most) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("cannot open " + path);
  file.seekg(0, std::ios::end);
  const auto size = file.tellg();
  if (size < 0) throw Error("cannot read " + path);
  if (uint64_t(size) > most)
    throw Error(path + ": " + std::to_string(uint64_t(size)) + " bytes are more than such a file may have");
  file.seekg(0);
  std::string text(size_t(size), '\0');
  file.read(&text[0], size);
  if (!file) throw Error("cannot read " + path);
  return text;
}

Json read_json(const std::string& path) { return parse_json(read_file(path), path); }

}  // namespace llm
