// A bundle's compiled text file: the tables of its tokenizer and its chat template.
//
// exporter/dlm_export/text/layout.py writes it, and docs/reference/bundle.md documents it. It has a
// header of sizes, then numbers in little-endian int32, then bytes. It is data only, and everything
// in it is checked when it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/view.h"

namespace dlm {

using Numbers = View<int32_t>;  // a part of the file

// One byte per code point, in pages of 256. Empty if there are no pages.
struct CodePointTable {
  Numbers pages;
  View<uint8_t> values;
  uint8_t operator[](char32_t point) const {
    return values[static_cast<size_t>(pages[point >> 8]) << 8 | (point & 0xFF)];
  }
};

// Strings stored one after another.
struct Strings {
  Numbers starts;
  std::string_view bytes;
  size_t size() const { return starts.size - 1; }
  std::string_view operator[](size_t i) const {
    const auto first = static_cast<size_t>(starts[i]);
    return bytes.substr(first, static_cast<size_t>(starts[i + 1]) - first);
  }
};

struct TextFile {
  enum TokenFlag : uint8_t { special = 1, whole = 2, byte = 4 };
  enum AddedFlag : int32_t { strips_left = 1, strips_right = 2, single_word = 4 };
  // How a chat uses a message's content: not at all, unchanged, or without surrounding white space.
  enum Transform : int32_t { refused = 0, as_is = 1, stripped = 2 };

  TextFile() = default;
  TextFile(TextFile&&) = default;  // a copy would point into its source
  TextFile& operator=(TextFile&&) = default;

  std::vector<int32_t> storage;  // the file; all other fields point into it

  int32_t vocab_size = 0;
  // The text of each token. `whole`: a piece with this text is this token, whatever the merges say.
  Strings tokens;
  View<uint8_t> token_flags;
  // The initial tokens of a piece: by character, otherwise by byte. -1: left out.
  Numbers byte_ids, char_points, char_ids;
  Numbers merges;  // [M, 3]: left, right, result; earlier entries merge first
  // Texts that are always one token: the first `raw_added` are matched before normalisation, the
  // others after it. Both parts ascend.
  Numbers added_ids, added_flags;
  Strings added;
  size_t raw_added = 0;

  bool has_space_letter = false;   // U+2581 becomes a space
  bool starts_with_space = false;  // a space is added at the start
  bool is_byte_fallback = false;   // adjacent byte tokens form text, or one U+FFFD each
  bool strips_space = false;       // decoding drops one space at the start
  // Each split in turn cuts text into its matches and the parts between them.
  CodePointTable classes;
  int32_t class_count = 0;
  // The states of split s are [split_starts[s], split_starts[s + 1]); the first is its start state.
  // A state has one entry per class, and one for the end of the text: twice the number of the next
  // state plus 1 (0: none), plus 1 if a match ends before that character.
  Numbers split_starts, split_tables;

  // Canonical composition (NFC). Class 0: never changes. Class 255: a starter that may change.
  // Other classes: the combining class.
  CodePointTable nfc;
  Numbers decomposed, decomposition_starts, decomposition_points;
  Numbers compositions;  // [F, 3]: first, second, result; ascending

  Numbers prefix, suffix;  // added around a prompt

  // Chats. A message's context is 2 * role, plus 1 for the last message. The text before a message
  // depends on its context and the previous role (0: none, else role + 1). The text after the last
  // message depends on its role. -1: not allowed.
  Strings chat_strings;
  Numbers roles;  // [R], their names; if a name is listed twice, the first is for first messages.
                  // If it is empty, the first string is the reason
  Numbers chat_transforms;             // [2 R]
  Numbers chat_gaps;                   // [R + 1, 2 R]
  Numbers chat_ends;                   // [R]
  Numbers literal_contexts, literals;  // text that a content must not contain, by context
  Numbers empty_contexts;              // contexts whose content must not be empty
};

// Reads and checks a file. `where` starts messages. Throws Error(DLM_BAD_BUNDLE, DLM_UNSUPPORTED).
TextFile read_text_file(const void* data, size_t size, const std::string& where);

}  // namespace dlm
