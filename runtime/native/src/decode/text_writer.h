// Makes the text of a request. A TextWriter decodes tokens as they are committed, and ends the text
// at the first stop string.
//
// A TextWriter decodes the tokens from the start of the text up to the first undecided position. If
// the policy may still replace tokens in finished blocks, the TextWriter stops at the start of the
// current block instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "decode/request.h"

namespace dlm {

// Decodes the next `count` ids, and appends their text to `out`, in whole characters. is_last means
// that no ids follow.
using Decode =
    std::function<void(const int32_t* ids, size_t count, bool is_last, std::string& out)>;

// Makes a Decode from a function that can decode only a whole list of ids. Each call also decodes
// the last two batches of ids again, because the text of a token may depend on the preceding ids.
Decode decode_by_windows(dlm_decode_fn decode, void* user);

class TextWriter {
 public:
  // `start` is the canvas position where the text starts. If tells_pieces is true, the TextWriter
  // also keeps the text that each step adds.
  TextWriter(const Denoiser& denoiser, Decode decode, size_t start, bool tells_pieces,
             std::vector<std::string> stop_strings);

  // Decodes the newly decided tokens. The runner calls this function after each pass and when the
  // request ends. Returns false if a stop string ended the text. In this case, the caller must end
  // the request.
  bool read(const Request& request);

  const std::string& text() const { return text_; }
  // Returns the text that the last read() added if tells_pieces is true, otherwise an empty text. A
  // NUL follows the text.
  std::string_view piece() const {
    return tells_pieces_ ? std::string_view(text_).substr(piece_start_) : std::string_view("");
  }
  bool is_stopped() const { return is_stopped_; }
  // Returns the number of generated tokens in the text. Tokens of the prompt do not count.
  int32_t completion_tokens() const { return completion_tokens_; }
  // Returns true if all tokens of the text are decided, and the tokens that end the text are
  // decided too.
  bool is_decided(const Request& request) const;

 private:
  void give(bool is_last);

  const Denoiser& denoiser_;
  const Decode decode_;
  const bool tells_pieces_;
  const std::vector<std::string> stop_strings_;
  size_t longest_stop_ = 0;  // in bytes
  size_t read_;              // all positions before this one were read
  std::vector<int32_t> fresh_;
  std::string text_, held_;  // held_ is decoded text that may be the start of a stop string
  size_t piece_start_ = 0;
  int32_t completion_tokens_ = 0;
  // True if an end token (is_ended_) or a stop string (is_stopped_) ended the text.
  bool is_ended_ = false, is_stopped_ = false;
};

}  // namespace dlm
