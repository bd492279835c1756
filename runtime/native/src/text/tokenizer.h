// Text to token ids and back, with a compiled text file. Builds compare it with Python's.
//
// Byte pair encoding over bytes, or over characters with bytes for those the vocabulary lacks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template.h"
#include "text/text_file.h"

namespace dlm {

constexpr size_t kMostTextBytes = size_t{1} << 28;  // the most to encode at once

// An open-addressing hash index of numbers; load factor at most 1/2.
class Index {
 public:
  void reserve(size_t count);
  // Throws Error(DLM_BAD_BUNDLE) if there are too many collisions to be chance.
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
  bool special_tokens = false;  // text of a special token becomes that token
};

class Text {
 public:
  // Reads and checks a file; throws like read_text_file.
  Text(const void* data, size_t size, const std::string& where);

  const TextFile& file() const { return file_; }

  // Appends the ids of a text. `how.is_prompt` adds the tokenizer's tokens around a prompt. Throws
  // Error(DLM_INVALID_ARGUMENT) for invalid UTF-8 and for special tokens that are not allowed.
  void encode(std::string_view text, Encode how, std::vector<int32_t>& out) const;
  // The same for a chat. Special tokens are recognised unless they touch a message's content.
  void encode_chat(const RenderedChat& chat, std::vector<int32_t>& out) const;

 private:
  friend class Encoding;
  bool is_special(int32_t token) const {
    return (file_.token_flags[token] & TextFile::special) != 0;
  }

  TextFile file_;
  const std::string where_;
  Index merges_, wholes_;
  uint8_t starts_added_[2][256] = {};  // first bytes of added texts, before and after normalising
};

// Decodes ids in batches into whole characters. The result does not depend on the batches.
class TextDecoder {
 public:
  explicit TextDecoder(std::shared_ptr<const Text> text) : text_(std::move(text)) {}

  // Appends the text of `count` further ids; unknown and special ones are skipped. is_last: no ids
  // follow.
  void operator()(const int32_t* ids, size_t count, bool is_last, std::string& out);

 private:
  void end_bytes(std::string& out);
  void put(std::string_view whole, std::string& out);

  std::shared_ptr<const Text> text_;
  std::string held_;  // bytes that may be an incomplete character
  bool is_at_start_ = true;
};

}  // namespace dlm
