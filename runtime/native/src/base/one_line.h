// Converts messages for callers to one line that is safe to print on a terminal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/utf8.h"

namespace dlm {

// Replaces control characters in a message. A message may quote text of a hostile file, and the
// quoted text must not control the terminal that prints the message. Control characters below
// U+0080 become spaces. Each control character from U+0080 to U+009F becomes two question marks.
inline void make_one_line(char* text, size_t size) noexcept {
  for (size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < ' ' || byte == 0x7F)
      text[i] = ' ';
    else if (i > 0 && text[i - 1] == '\xC2' && byte >= 0x80 && byte <= 0x9F)
      text[i - 1] = text[i] = '?';
  }
}

// Converts a message of a third-party library to one line of UTF-8. Cuts messages that are longer
// than 600 bytes. The message may quote text of a hostile file.
inline std::string one_line(std::string text) {
  if (text.size() > 600) text.replace(600, std::string::npos, "...");
  make_one_line(text.data(), text.size());
  if (!is_utf8(text))
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c > 0x7F; }, '?');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

}  // namespace dlm
