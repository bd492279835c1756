// A bundle's compiled text file. The file contains the tables of the tokenizer and of the chat
// template.
//
// exporter/dlm_export/text/layout.py writes the file, and docs/reference/bundle.md documents it.
// The file consists of a header with the sizes of the tables, then int32 numbers in little-endian
// order, then bytes. The file contains only data, no code. All data is checked when the file is
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/view.h"

namespace dlm {

using Numbers = View<int32_t>;  // an array of numbers in the file

// A table with one byte for each code point. The table is stored in pages of 256 code points. A
// table without pages is empty.
struct CodePointTable {
  Numbers pages;
  View<uint8_t> values;
  uint8_t operator[](char32_t point) const {
    return values[static_cast<size_t>(pages[point >> 8]) << 8 | (point & 0xFF)];
  }
};

// A list of strings, stored one after another.
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
  enum TokenFlag : uint8_t { special = 1, whole = 2, byte = 4, continues = 8 };
  enum AddedFlag : int32_t { strips_left = 1, strips_right = 2, single_word = 4 };
  // How a chat uses the content of a message. The chat rejects the message, uses the content
  // unchanged, or uses the content without surrounding white space.
  enum Transform : int32_t { refused = 0, as_is = 1, stripped = 2 };

  TextFile() = default;
  TextFile(TextFile&&) = default;  // movable, but not copyable: a copy would point into the object
                                   // from which it was copied
  TextFile& operator=(TextFile&&) = default;

  std::vector<int32_t> storage;  // content of the file; all other fields point into this content

  int32_t vocab_size = 0;
  // The text of each token. If a token has the flag `whole`, and a piece equals the token's text,
  // the piece is encoded as this token without merging.
  Strings tokens;
  View<uint8_t> token_flags;
  // The tokens of a piece before merging. A character in char_points becomes one token. Any other
  // character becomes one token for each of its bytes. -1 means that a byte has no token and is
  // left out.
  Numbers byte_ids, char_points, char_ids;
  Numbers merges;  // [M, 3]: left token, right token, merged token; earlier merges have priority
  // Added texts, which are texts that are always encoded as one token. The first `raw_added` added
  // texts are matched before normalisation. The remaining added texts are matched after
  // normalisation. Each of these two parts is in ascending order.
  Numbers added_ids, added_flags;
  Strings added;
  size_t raw_added = 0;

  bool has_space_letter = false;   // U+2581 represents a space
  bool starts_with_space = false;  // encoding adds a space at the start
  // True if a word is encoded as its longest tokens from left to right (WordPiece). Then the flag
  // `whole` marks the tokens of the vocabulary, and byte_ids[0] is the unknown token. The text of a
  // token is its text after other tokens. If the token has the flag `continues`, it continues a
  // word.
  bool has_word_pieces = false;
  bool drops_space = false;  // pieces of white space are not encoded
  // True if adjacent byte tokens are decoded together, so that each invalid byte becomes U+FFFD.
  bool is_byte_fallback = false;
  bool strips_space = false;  // decoding removes one space at the start
  // Splits cut the text into pieces before merging, one split after another. A split cuts its text
  // into matches and the parts between matches. `classes` contains the character class of each code
  // point.
  CodePointTable classes;
  int32_t class_count = 0;
  // Each split is a state machine. The states of split s are numbered from split_starts[s] to
  // split_starts[s + 1] - 1. State split_starts[s] is the start state. A state has one entry for
  // each character class, and one for the end of the text. An entry is 2 * (next state + 1), or 0
  // if there is no next state. If a match may end before the character, 1 is added to the entry.
  Numbers split_starts, split_tables;

  // Tables for normalising text. In a WordPiece vocabulary, the class of a code point in `nfc` is
  // one of RewriteClass, and `decomposed` contains the replacements of code points.
  enum RewriteClass : uint8_t { dropped = 1, breaks = 2, padded = 3, replaced = 4, marks = 8 };
  // In other vocabularies, these are the tables for composing text (NFC). `nfc` contains a class
  // for each code point. The class is 0 if the code point never changes, and 255 if the code point
  // is a starter that may change. Otherwise the class is the combining class.
  CodePointTable nfc;
  Numbers decomposed, decomposition_starts, decomposition_points;
  // [F, 3]: first code point, second code point, composition; in ascending order.
  Numbers compositions;

  Numbers prefix, suffix;  // token ids added before and after a prompt

  // Tables for chats. The context of a message is the number 2 * role, plus 1 if the message is the
  // last message. The text before a message depends on its context and on the previous role. (The
  // previous role is stored as role + 1. 0 means that there is no previous message.) The text after
  // the last message depends on the role of that message. The entry -1 means that the conversation
  // is not allowed.
  Strings chat_strings;
  // [R]: the names of the R roles. If a name is listed twice, the first entry applies only to the
  // first message of a conversation. If there are no roles, the first string of chat_strings says
  // why chats are not supported.
  Numbers roles;
  Numbers chat_transforms;             // [2 R]
  Numbers chat_gaps;                   // [R + 1, 2 R]
  Numbers chat_ends;                   // [R]
  Numbers literal_contexts, literals;  // for each context: texts that the content of a message must
                                       // not contain
  Numbers empty_contexts;              // contexts in which the content must not be empty
};

// Reads and checks the content of a text file. `where` is the start of error messages. Throws
// Error(DLM_BAD_BUNDLE, DLM_UNSUPPORTED).
TextFile read_text_file(const void* data, size_t size, const std::string& where);

}  // namespace dlm
