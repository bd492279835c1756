// The text of a request: decodes tokens as they are decided, and ends at the first stop string.
//
// Tokens are read from the front of the text up to the first undecided position. Where finished
// blocks may still be edited, they are read up to the current block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "decode/request.h"

namespace dlm {

// Appends to `out` what further ids add to a text, in whole characters. is_last: no others follow.
using Decode =
    std::function<void(const int32_t* ids, size_t count, bool is_last, std::string& out)>;

// Makes a Decode of a function that decodes whole runs of ids. It decodes the last two runs each
// time, because the ids just before a token may change how it is spelled.
Decode decode_by_windows(dlm_decode_fn decode, void* user);

class TextWriter {
 public:
  // start: of the text in the canvas. tells_pieces: the text that each step adds is wanted too.
  TextWriter(const Denoiser& denoiser, Decode decode, size_t start, bool tells_pieces,
             std::vector<std::string> stop_strings);

  // Called after a pass and once done. False: a stop string ended the text, so the request must
  // end.
  bool read(const Request& request);

  const std::string& text() const { return text_; }
  // What the last read added, if pieces are wanted; followed by NUL.
  std::string_view piece() const {
    return tells_pieces_ ? std::string_view(text_).substr(piece_start_) : std::string_view("");
  }
  bool is_stopped() const { return is_stopped_; }
  // Tokens of the text that were not given.
  int32_t completion_tokens() const { return completion_tokens_; }
  // Whether the tokens of the text, and what ends it, are decided.
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
  std::string text_, held_;  // held_: decoded, and perhaps the start of a stop string
  size_t piece_start_ = 0;
  int32_t completion_tokens_ = 0;
  bool is_ended_ = false, is_stopped_ = false;  // by an end token, by a stop string
};

}  // namespace dlm
