// Makes the text of a request. A TextWriter decodes tokens as soon as they are committed, and ends
// the text at the first stop string.
//
// A TextWriter decodes the tokens from the start of the text to the first undecided position. If
// the policy may still replace tokens of the current block, decoding stops at the start of this
// block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "decode/request.h"

namespace dlm {

// A function that decodes the next `count` ids, and appends the complete characters of their text
// to `out`. If is_last is true, no more ids follow.
using Decode =
    std::function<void(const int32_t* ids, size_t count, bool is_last, std::string& out)>;

// Makes a Decode from a callback that can only decode a complete list of ids. Each call decodes the
// preceding ids again (at most two batches), because the text of a token may depend on them.
Decode decode_by_windows(dlm_decode_fn decode, void* user);

class TextWriter {
 public:
  // `start` is the canvas position where the text starts. If tells_pieces is true, piece() returns
  // the text that each step adds.
  TextWriter(const Denoiser& denoiser, Decode decode, size_t start, bool tells_pieces,
             std::vector<std::string> stop_strings);

  // Decodes the tokens that were decided since the last call. The runner calls this function after
  // each pass and when the request ends. Returns false if a stop string has ended the text. Then
  // the caller must end the request.
  bool read(const Request& request);

  const std::string& text() const { return text_; }
  // If tells_pieces is true, returns the text that the last read() added. Otherwise returns an
  // empty text. A NUL follows the text.
  std::string_view piece() const {
    return tells_pieces_ ? std::string_view(text_).substr(piece_start_) : std::string_view("");
  }
  bool is_stopped() const { return is_stopped_; }
  // Returns the number of generated tokens in the text. Tokens of the prompt do not count.
  int32_t completion_tokens() const { return completion_tokens_; }
  // Returns true if all tokens of the text are decided, including the tokens that end the text.
  bool is_decided(const Request& request) const;

 private:
  void give(bool is_last);

  const Denoiser& denoiser_;
  const Decode decode_;
  const bool tells_pieces_;
  const std::vector<std::string> stop_strings_;
  size_t longest_stop_ = 0;  // in bytes
  size_t read_;              // canvas position of the next token to decode
  std::vector<int32_t> fresh_;
  std::string text_, held_;  // held_: the end of the text, if a stop string may start there
  size_t piece_start_ = 0;
  int32_t completion_tokens_ = 0;
  // True if the text has ended, with an end token (is_ended_) or with a stop string (is_stopped_).
  bool is_ended_ = false, is_stopped_ = false;
};

}  // namespace dlm
