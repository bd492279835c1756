// A bundle's compiled text file. The file contains the tables of the tokenizer and of the chat
// template.
//
// exporter/dlm_export/text/layout.py writes the file, and docs/reference/bundle.md documents it.
// The file consists of a header with the sizes of the tables, then int32 numbers in little-endian
// order, then bytes. The file contains only data, no code. read_text_file() checks all data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/view.h"

namespace dlm {

using Numbers = View<int32_t>;  // an array of int32 numbers in the file

// A table with one byte for each code point. The table is stored in pages of 256 code points. If
// there are no pages, the table is empty.
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
  // How the code changes the content of a chat message. `refused` rejects the message. `as_is` uses
  // the content unchanged. `stripped` removes white space at both ends of the content.
  enum Transform : int32_t { refused = 0, as_is = 1, stripped = 2 };

  TextFile() = default;
  // A TextFile can be moved, but not copied, because the fields of a copy would point into the
  // storage of the original.
  TextFile(TextFile&&) = default;
  TextFile& operator=(TextFile&&) = default;

  // The content of the file. The tables below point into this content.
  std::vector<int32_t> storage;

  int32_t vocab_size = 0;
  // The text of each token. The tokenizer cuts a text into pieces, and encodes each piece
  // separately. If a piece equals the text of a token that has the flag `whole`, the piece becomes
  // this token without merging.
  Strings tokens;
  View<uint8_t> token_flags;
  // These tables say which tokens a piece consists of before merging. If a character is in
  // char_points, the character becomes the token at the same index of char_ids. Otherwise each byte
  // of the character becomes the token that byte_ids lists for this byte. If byte_ids contains -1
  // for a byte, the byte has no token and is left out.
  Numbers byte_ids, char_points, char_ids;
  // [M, 3]: the left token, the right token and the merged token of each merge. A merge that comes
  // earlier in this table has priority.
  Numbers merges;
  // An added text is a text that is encoded as one token, without splits and merges. The tokenizer
  // matches the first `raw_added` added texts before normalisation, and the remaining added texts
  // after normalisation. Each of these two parts of the list is sorted by the added texts, in
  // ascending order.
  Numbers added_ids, added_flags;
  Strings added;
  size_t raw_added = 0;

  bool has_space_letter = false;   // true: U+2581 represents a space
  bool starts_with_space = false;  // true: encoding adds a space at the start of the text
  // True for WordPiece, which encodes a word as its longest tokens from left to right. With
  // WordPiece, the flag `whole` marks the tokens of the vocabulary, and byte_ids[0] is the unknown
  // token. `tokens` contains the text to which each token is decoded if other tokens come before
  // it. If a token has the flag `continues`, the token continues a word.
  bool has_word_pieces = false;
  bool drops_space = false;  // true: pieces of white space are not encoded
  // True if adjacent byte tokens are decoded together. If their bytes are not valid UTF-8, each of
  // these bytes becomes U+FFFD.
  bool is_byte_fallback = false;
  bool strips_space = false;  // true: decoding removes one space at the start of the text
  // Before merging, splits cut the text into pieces. The first split cuts the whole text. Each
  // later split cuts the pieces of the split before it. A split is a regular expression. It cuts a
  // text into the parts that match, and the parts between these matches. `classes` contains the
  // character class of each code point.
  CodePointTable classes;
  int32_t class_count = 0;
  // Each split is a state machine. The states of split s are numbered from split_starts[s] to
  // split_starts[s + 1] - 1. State split_starts[s] is the start state. A state has one entry for
  // each character class, and one for the end of the text. An entry is 2 * (next state + 1), or 0
  // if there is no next state. If a match may end before the character of the entry, 1 is added to
  // the entry.
  Numbers split_starts, split_tables;

  // Tables for normalising text. In a WordPiece vocabulary, `nfc` contains a RewriteClass for each
  // code point. If the class is above `marks`, the code point is a combining mark. Neighbouring
  // marks are sorted by their classes. `decomposed` contains the replacements of code points.
  enum RewriteClass : uint8_t { dropped = 1, breaks = 2, padded = 3, replaced = 4, marks = 8 };
  // In other vocabularies, these are the tables for composing text (NFC). `nfc` contains a class
  // for each code point. The class is 0 if the code point never changes, and 255 if the code point
  // is a starter that may change. Otherwise the class is the combining class.
  CodePointTable nfc;
  Numbers decomposed, decomposition_starts, decomposition_points;
  // [F, 3]: two code points, and the code point into which they are composed. The rows are in
  // ascending order.
  Numbers compositions;

  Numbers prefix, suffix;  // token ids that are added before and after a prompt

  // Tables for chats. The context of a message is the number 2 * role, plus 1 if the message is the
  // last message. The text before a message depends on the context of the message and on the role
  // of the previous message. The previous role is stored as role + 1, or as 0 if there is no
  // previous message. The text after the last message depends on the role of the last message. In
  // these tables, -1 means that the conversation is not allowed.
  Strings chat_strings;
  // In this table and the next tables, strings are indices into chat_strings. [R]: the names of the
  // R roles. If two entries have the same name, the first entry applies only to the first message
  // of a conversation. If there are no roles, the first string of chat_strings says why chats are
  // not supported.
  Numbers roles;
  Numbers chat_transforms;  // [2 R]: for each context, a Transform
  // [R + 1, 2 R]: for each previous role and each context, the text before the message.
  Numbers chat_gaps;
  Numbers chat_ends;  // [R]: for each role, the text after the last message
  // In the context literal_contexts[i], the content of a message must not contain the string
  // literals[i].
  Numbers literal_contexts, literals;
  Numbers empty_contexts;  // contexts in which the content must not be empty
};

// Reads and checks the content of a text file. Error messages start with `where`. Throws an Error
// with status DLM_BAD_BUNDLE if the content is not valid. Throws an Error with status
// DLM_UNSUPPORTED if the version of the file is unknown.
TextFile read_text_file(const void* data, size_t size, const std::string& where);

}  // namespace dlm
