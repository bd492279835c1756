// A bundle's compiled text file: tables of its tokenizer and of its chat template.
//
// exporter/dlm_export/text/layout.py writes it, and docs/reference/bundle.md says what it holds. It
// is data alone: numbers in little-endian int32 behind a header of sizes, then bytes. All is
// checked at reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dlm {

// A piece of the file.
template <class T>
struct View {
  const T* data = nullptr;
  size_t size = 0;
  const T& operator[](size_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};
using Numbers = View<int32_t>;

// A byte for every code point, by pages of 256; none where there are no pages.
struct CodePointTable {
  Numbers pages;
  View<uint8_t> values;
  uint8_t operator[](char32_t point) const {
    return values[static_cast<size_t>(pages[point >> 8]) << 8 | (point & 0xFF)];
  }
};

// Strings that lie one behind the other.
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
  // How a message's content is put into the chat: not, as it is, or without white space around it.
  enum Transform : int32_t { refused = 0, as_is = 1, stripped = 2 };

  TextFile() = default;
  TextFile(TextFile&&) = default;  // a copy would point into what it was copied from
  TextFile& operator=(TextFile&&) = default;

  std::vector<int32_t> storage;  // the file, which all else points into

  int32_t vocab_size = 0;
  // The text of each token; `whole`: a piece of that text is that token, whatever merges say.
  Strings tokens;
  View<uint8_t> token_flags;
  // What a piece starts from: tokens of characters, and of bytes for all others; -1: left out.
  Numbers byte_ids, char_points, char_ids;
  Numbers merges;  // [M, 3]: left, right, what they become; the first is merged first
  // Texts that are always one token: the first `raw_added` in the text as given, the others in the
  // normalised text. Both parts ascend.
  Numbers added_ids, added_flags;
  Strings added;
  size_t raw_added = 0;

  bool has_space_letter = false;   // U+2581 becomes a space
  bool starts_with_space = false;  // a space is put before
  bool is_byte_fallback = false;   // bytes that follow each other are text together, or U+FFFD each
  bool strips_space = false;       // one space at the start of a decoded text is left out
  // Text is cut by each split in turn, into its matches and what lies between them.
  CodePointTable classes;
  int32_t class_count = 0;
  // Of split s the states [split_starts[s], split_starts[s + 1]), the first being its start. A
  // state has an entry for each class, and one for the end of the text: twice the state behind it
  // plus 1 (0: none), plus 1 where a match ends before that character.
  Numbers split_starts, split_tables;

  // Canonical composition (NFC). Classes: 0 for characters that never change, 255 for starters that
  // may change, else the combining class.
  CodePointTable nfc;
  Numbers decomposed, decomposition_starts, decomposition_points;
  Numbers compositions;  // [F, 3]: first, second, what they become; ascending

  Numbers prefix, suffix;  // what is put around a prompt

  // Of chats. A context is 2 * role + 1 for the last message, 2 * role for others; what stands
  // before a message depends on that and on the role before it (0: none, else role + 1), what
  // stands behind the last on its role. -1: no such chat.
  Strings chat_strings;
  Numbers roles;  // [R], their names; of one that stands twice the first is for first messages.
                  // Where there are none, the first string says why
  Numbers chat_transforms;             // [2 R]
  Numbers chat_gaps;                   // [R + 1, 2 R]
  Numbers chat_ends;                   // [R]
  Numbers literal_contexts, literals;  // what a content may not hold, by context
  Numbers empty_contexts;              // where it may not be empty
};

// Reads and checks a file. `where` starts messages. Throws Error(DLM_BAD_BUNDLE, DLM_UNSUPPORTED).
TextFile read_text_file(const void* data, size_t size, const std::string& where);

}  // namespace dlm
