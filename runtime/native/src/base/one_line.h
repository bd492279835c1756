// Sentences as callers get them: of one line, and fit for a terminal.
#pragma once

#include <cstddef>

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

}  // namespace dlm
