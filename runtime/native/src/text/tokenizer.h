// The tokenizer: converts text to token ids and back. The tokenizer uses the tables of a compiled
// text file. Each build of a bundle compares the results of this tokenizer with the results of the
// Python tokenizer.
//
// The tokenizer implements WordPiece and byte pair encoding. With byte pair encoding, in some
// vocabularies, tokens are sequences of bytes.
// In other vocabularies, tokens are sequences of characters. If a vocabulary of characters lacks a
// character, the character is encoded as bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template.h"
#include "text/text_file.h"

namespace dlm {

constexpr size_t kMostTextBytes = size_t{1} << 28;  // largest number of bytes of text that one call
                                                    // encodes

// An open-addressing hash index of numbers. The load factor is at most 1/2.
class Index {
 public:
  void reserve(size_t count);
  // Adds a number. Throws Error(DLM_BAD_BUNDLE) if there are so many hash collisions that the
  // numbers must have been chosen on purpose.
  void insert(uint64_t hash, int32_t number);
  template <class IsIt>
  int32_t find(uint64_t hash, IsIt is_it) const {
    for (size_t slot = hash & mask_; slots_[slot] >= 0; slot = (slot + 1) & mask_)
      if (is_it(slots_[slot])) return slots_[slot];
    return -1;
  }
  size_t bytes() const { return slots_.size() * sizeof(int32_t); }

 private:
  std::vector<int32_t> slots_{-1};
  size_t mask_ = 0;
};

struct Encode {
  bool is_prompt = false;
  bool special_tokens = false;  // true: the text of a special token becomes that token
};

class Text {
 public:
  // Reads and checks the content of a text file. Throws the same errors as read_text_file.
  Text(const void* data, size_t size, const std::string& where);

  const TextFile& file() const { return file_; }

  // Appends the ids of a text to `out`. If `how.is_prompt` is true, also adds the tokens that the
  // tokenizer puts around a prompt. Throws Error(DLM_INVALID_ARGUMENT) if the text is invalid UTF-8
  // or encodes to a special token that is not allowed.
  void encode(std::string_view text, Encode how, std::vector<int32_t>& out) const;
  // Appends the ids of a chat to `out`. Special tokens are recognised only in the template's text.
  // If a text includes a part of a message's content, the text is never encoded as a special token.
  void encode_chat(const RenderedChat& chat, std::vector<int32_t>& out) const;

 private:
  friend class Encoding;
  bool is_special(int32_t token) const {
    return (file_.token_flags[token] & TextFile::special) != 0;
  }

  // For WordPiece: true if a token continues a word; and the text of the token in a word.
  bool continues(int32_t token) const {
    return (file_.token_flags[token] & TextFile::continues) != 0;
  }
  std::string_view piece(int32_t token) const {
    const std::string_view text = file_.tokens[token];
    const bool is_spaced = file_.strips_space && !continues(token) && !text.empty();
    return text.substr(is_spaced && text.front() == ' ' ? 1 : 0);
  }

  TextFile file_;
  const std::string where_;
  Index merges_, wholes_;
  // For each byte: 1 if an added text can start with this byte. One table is for the text before
  // normalisation, and one table is for the text after normalisation.
  uint8_t starts_added_[2][256] = {};
};

// Decodes token ids to text, in batches. Each batch returns only whole characters. So different
// splits into batches give the same text.
class TextDecoder {
 public:
  explicit TextDecoder(std::shared_ptr<const Text> text) : text_(std::move(text)) {}

  // Decodes the next `count` ids, and appends their text to `out`. Skips unknown and special ids.
  // is_last means that no ids follow.
  void operator()(const int32_t* ids, size_t count, bool is_last, std::string& out);

 private:
  void end_bytes(std::string& out);
  void put(std::string_view whole, std::string& out);

  std::shared_ptr<const Text> text_;
  std::string held_;  // bytes that may be the start of a character
  bool is_at_start_ = true;
};

}  // namespace dlm
