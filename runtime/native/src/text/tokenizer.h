// The tokenizer: converts text to token ids and back, with the tables of a compiled text file. When
// a bundle is built, the results are compared with those of the Python tokenizer.
//
// It implements byte pair encoding. Tokens are sequences of bytes, or sequences of characters; then
// a character that the vocabulary lacks is encoded as bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template.h"
#include "text/text_file.h"

namespace dlm {

constexpr size_t kMostTextBytes = size_t{1} << 28;  // most bytes of text in one call

// An open-addressing hash index of numbers. The load factor is at most 1/2.
class Index {
 public:
  void reserve(size_t count);
  // Throws Error(DLM_BAD_BUNDLE) if there are more collisions than chance would explain.
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
  bool special_tokens = false;  // text of a special token is encoded as that token
};

class Text {
 public:
  // Reads and checks a file; throws like read_text_file.
  Text(const void* data, size_t size, const std::string& where);

  const TextFile& file() const { return file_; }

  // Appends the ids of a text to `out`. If `how.is_prompt` is set, also adds the tokens that the
  // tokenizer puts around a prompt. Throws Error(DLM_INVALID_ARGUMENT) for invalid UTF-8, and for
  // special tokens that are not allowed.
  void encode(std::string_view text, Encode how, std::vector<int32_t>& out) const;
  // Appends the ids of a chat. Special tokens in the template's text are recognised. Text that
  // touches the content of a message is never recognised as a special token.
  void encode_chat(const RenderedChat& chat, std::vector<int32_t>& out) const;

 private:
  friend class Encoding;
  bool is_special(int32_t token) const {
    return (file_.token_flags[token] & TextFile::special) != 0;
  }

  TextFile file_;
  const std::string where_;
  Index merges_, wholes_;
  uint8_t starts_added_[2][256] = {};  // first bytes of added texts, before and after normalisation
};

// Decodes token ids to text, in batches. Only whole characters are returned, so how the ids are
// split into batches does not change the text.
class TextDecoder {
 public:
  explicit TextDecoder(std::shared_ptr<const Text> text) : text_(std::move(text)) {}

  // Decodes `count` more ids and appends their text to `out`. Skips unknown and special ids.
  // is_last: no ids follow.
  void operator()(const int32_t* ids, size_t count, bool is_last, std::string& out);

 private:
  void end_bytes(std::string& out);
  void put(std::string_view whole, std::string& out);

  std::shared_ptr<const Text> text_;
  std::string held_;  // bytes that may be the start of a character
  bool is_at_start_ = true;
};

}  // namespace dlm
