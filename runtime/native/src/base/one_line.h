// Sentences as callers get them: of one line, and fit for a terminal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/utf8.h"

namespace dlm {

// A message may quote a file, and must not steer the terminal that it is printed on: control
// characters become spaces, and those of U+0080 to U+009F two question marks.
inline void make_one_line(char* text, size_t size) noexcept {
  for (size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < ' ' || byte == 0x7F)
      text[i] = ' ';
    else if (i > 0 && text[i - 1] == '\xC2' && byte >= 0x80 && byte <= 0x9F)
      text[i - 1] = text[i] = '?';
  }
}

// A foreign message, which may quote a hostile file, as one line of UTF-8 of at most 600 bytes.
inline std::string one_line(std::string text) {
  if (text.size() > 600) text.replace(600, std::string::npos, "...");
  make_one_line(text.data(), text.size());
  if (!is_utf8(text))
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c > 0x7F; }, '?');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

}  // namespace dlm
