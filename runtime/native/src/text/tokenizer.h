// The tokenizer converts text to token ids and back. The tokenizer uses the tables of a compiled
// text file. Each build of a bundle compares the results of this tokenizer with the results of the
// Python tokenizer.
//
// The tokenizer implements WordPiece and byte pair encoding. In some vocabularies for byte pair
// encoding, tokens are sequences of bytes. In other vocabularies, tokens are sequences of
// characters. If a vocabulary of characters lacks a character, the tokenizer encodes each byte of
// the character as a token.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_segments.h"
#include "text/text_file.h"

namespace dlm {

// The largest size of a text that one call encodes, in bytes.
constexpr size_t kMostTextBytes = size_t{1} << 28;

// A hash index of numbers with open addressing. The load factor is at most 1/2.
class Index {
 public:
  void reserve(size_t count);
  // Adds a number. Throws an Error with status DLM_BAD_BUNDLE if there are so many hash collisions
  // that the keys must have been chosen to collide.
  void insert(uint64_t hash, int32_t number);
  template <class IsIt>
  int32_t find(uint64_t hash, IsIt is_it) const {
    for (size_t slot = hash & mask_; slots_[slot] >= 0; slot = (slot + 1) & mask_)
      if (is_it(slots_[slot])) return slots_[slot];
    return -1;
  }

 private:
  std::vector<int32_t> slots_{-1};
  size_t mask_ = 0;
};

struct Encode {
  bool is_prompt = false;
  // True: the text of a special token is encoded as that special token.
  bool special_tokens = false;
  // True: the text follows other text, so the tokenizer adds no space before it.
  bool follows_text = false;
};

// In WordPiece, the text of a token that continues a word starts with this prefix.
constexpr std::string_view kContinues = "##";

class Text {
 public:
  // Reads and checks the content of a text file. Throws the same errors as read_text_file().
  Text(const void* data, size_t size, const std::string& where);

  const TextFile& file() const { return file_; }

  // Appends the ids of a text to `out`. If `how.is_prompt` is true, also adds the tokens that the
  // tokenizer puts around a prompt. Throws an Error with status DLM_INVALID_ARGUMENT if the text is
  // not valid UTF-8, or if the result would contain a special token that is not allowed.
  void encode(std::string_view text, Encode how, std::vector<int32_t>& out) const;
  // Appends the ids of a chat to `out`. This function recognises special tokens only in text that
  // comes from the chat template. Text from a message's content never becomes part of a special
  // token.
  void encode_chat(const RenderedChat& chat, std::vector<int32_t>& out) const;

 private:
  friend class Encoding;
  bool is_special(int32_t token) const {
    return (file_.token_flags[token] & TextFile::special) != 0;
  }

  // The next two functions are for WordPiece. continues() returns true if a token continues a word.
  // piece() returns the part of a word that the token encodes.
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
  // Two tables with an entry for each byte. The entry is 1 if an added text (the text of an added
  // token) starts with the byte. Table 0 is for added texts that are matched before normalisation.
  // Table 1 is for added texts that are matched after normalisation.
  uint8_t starts_added_[2][256] = {};
};

// Decodes token ids to text. The ids may arrive in batches. Each batch returns only whole
// characters. So the decoded text does not depend on the sizes of the batches.
class TextDecoder {
 public:
  explicit TextDecoder(std::shared_ptr<const Text> text) : text_(std::move(text)) {}

  // Decodes the next `count` ids, and appends their text to `out`. Skips unknown and special ids.
  // If is_last is true, these are the last ids.
  void operator()(const int32_t* ids, size_t count, bool is_last, std::string& out);

 private:
  void end_bytes(std::string& out);
  void put(std::string_view whole, std::string& out);

  std::shared_ptr<const Text> text_;
  std::string held_;  // bytes that are not decoded yet
  bool is_at_start_ = true;
};

}  // namespace dlm
