#include "text.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>

namespace llm {

namespace {

// Deeper than any serious file.
constexpr int kDeepest = 64;

// A directory that does not exist may be the name of a model that was not downloaded: OWNER/NAME.
std::string why_not_open(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code none;
  const std::string directory = fs::path(path).parent_path().string(), failed = "cannot open " + path;
  if (directory.empty() || fs::is_directory(directory, none)) return failed;
  if (fs::exists(directory, none)) return failed + ": " + directory + " is not a directory";
  const auto usual = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("/-_.", c); };
  const bool is_name = fs::path(path).filename() == "config.json" && directory[0] != '.' && directory[0] != '/' &&
                       std::count(directory.begin(), directory.end(), '/') == 1 &&
                       std::all_of(directory.begin(), directory.end(), usual);
  const std::string why = failed + ": no such directory";
  return is_name ? why + "; to download: hf download " + directory + " --local-dir " + directory : why;
}

}  // namespace

std::string fixed(double x, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << x;
  return out.str();
}

std::string listed(const std::vector<std::string>& all, const char* last) {
  std::string out;
  for (size_t i = 0; i < all.size(); ++i) out += (i == 0 ? "" : i + 1 < all.size() ? ", " : last) + all[i];
  return out;
}

void put(std::FILE* out, const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), out);
  if (std::fflush(out) != 0 || std::ferror(out) != 0) throw OutputError();
}

Json parse_json(const std::string& text, const std::string& what) {
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kDeepest) throw Error(what + ": JSON nested more than " + std::to_string(kDeepest) + " levels deep");
    return true;
  };
  try {
    return Json::parse(text, shallow);
  } catch (const Json::exception& e) {
    throw Error(what + ": invalid JSON: " + shown(e.what(), 160));
  }
}

bool file_exists(const std::string& path) { return std::ifstream(path).good(); }

void refuse_pointer(std::string_view bytes, const std::string& what) {
  if (bytes.rfind("version https://git-lfs", 0) == 0)
    throw Error(what + ": a Git LFS pointer, not the file; run git lfs pull");
}

std::string read_file(const std::string& path, size_t most) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(why_not_open(path));
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) throw Error(path + ": a directory, not a file");
  // Piece by piece, because a pipe has no size and cannot be rewound.
  std::string text;
  std::vector<char> piece(size_t(1) << 16);
  while (file.read(piece.data(), std::streamsize(piece.size())), file.gcount() > 0) {
    text.append(piece.data(), size_t(file.gcount()));
    if (text.size() > most) throw Error(path + ": larger than " + std::to_string(most) + " bytes");
  }
  if (file.bad()) throw Error("cannot read " + path);
  refuse_pointer(text, path);
  return text;
}

Json read_json(const std::string& path) { return parse_json(read_file(path), path); }

}  // namespace llm
