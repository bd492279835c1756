// The text of a request: decodes tokens as they are committed, and ends at the first stop string.
//
// Reads tokens from the start of the text up to the first undecided position. If finished blocks
// may still be edited, it reads up to the current block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "decode/request.h"

namespace dlm {

// Appends to `out` the text that further ids add, in whole characters. is_last: no ids follow.
using Decode =
    std::function<void(const int32_t* ids, size_t count, bool is_last, std::string& out)>;

// Makes a Decode of a function that decodes whole lists of ids. It decodes the last two batches of
// ids again each time, because the ids before a token may change its spelling.
Decode decode_by_windows(dlm_decode_fn decode, void* user);

class TextWriter {
 public:
  // start: of the text in the canvas. tells_pieces: also keep the text that each step adds.
  TextWriter(const Denoiser& denoiser, Decode decode, size_t start, bool tells_pieces,
             std::vector<std::string> stop_strings);

  // Called after each pass and at the end. Returns false if a stop string ended the text; the
  // caller must then end the request.
  bool read(const Request& request);

  const std::string& text() const { return text_; }
  // The text that the last read added, if tells_pieces; ends with NUL.
  std::string_view piece() const {
    return tells_pieces_ ? std::string_view(text_).substr(piece_start_) : std::string_view("");
  }
  bool is_stopped() const { return is_stopped_; }
  // Generated tokens of the text (given ones do not count).
  int32_t completion_tokens() const { return completion_tokens_; }
  // True if the tokens of the text, and those that end it, are decided.
  bool is_decided(const Request& request) const;

 private:
  void give(bool is_last);

  const Denoiser& denoiser_;
  const Decode decode_;
  const bool tells_pieces_;
  const std::vector<std::string> stop_strings_;
  size_t longest_stop_ = 0;  // bytes
  size_t read_;              // positions before this one were read
  std::vector<int32_t> fresh_;
  std::string text_, held_;  // held_: decoded, but may be the start of a stop string
  size_t piece_start_ = 0;
  int32_t completion_tokens_ = 0;
  bool is_ended_ = false, is_stopped_ = false;  // by an end token, by a stop string
};

}  // namespace dlm
