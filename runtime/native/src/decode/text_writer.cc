#include "decode/text_writer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"

namespace dlm {
namespace {

class WindowDecoder {
 public:
  WindowDecoder(dlm_decode_fn decode, void* user) : decode_(decode), user_(user) {}

  void operator()(const int32_t* ids, size_t count, bool is_last, std::string& out) {
    window_.insert(window_.end(), ids, ids + count);
    const std::string decoded = text_of(window_);
    std::string_view whole = decoded;
    // The text may end with an incomplete character. The next ids may complete this character, so
    // the function does not return it yet.
    const size_t mark = kReplacement.size();
    while (!is_last && whole.size() >= mark && whole.substr(whole.size() - mark) == kReplacement)
      whole.remove_suffix(mark);
    out += whole.substr(std::min(told_, whole.size()));
    told_ = std::max(told_, whole.size());
    if (whole.size() < decoded.size() || count == window_.size()) return;
    window_.assign(ids, ids + count);
    told_ = text_of(window_).size();
  }

 private:
  std::string text_of(const std::vector<int32_t>& ids) const {
    std::string found;
    if (ids.empty()) return found;
    // The callback is called again at most once, because its text depends only on the ids.
    constexpr size_t kMostTokenBytes = 1 << 16;
    bool is_second = false;
    for (size_t size = 16 * ids.size();; is_second = true) {
      found.resize(size);
      const dlm_status status =
          decode_(user_, ids.data(), ids.size(), found.data(), found.size(), &size);
      if (status != DLM_OK)
        fail(status, "the decode callback returned %d (%s)", static_cast<int>(status),
             dlm_status_name(status));
      if (size > kMostTokenBytes * ids.size() || (is_second && size > found.size()))
        fail(DLM_INVALID_ARGUMENT,
             "the decode callback set *size to %zu for %zu tokens, after a capacity of %zu bytes: "
             "*size must be the size of the text, and at most %zu bytes per token",
             size, ids.size(), found.size(), kMostTokenBytes);
      if (size > found.size()) continue;
      found.resize(size);
      if (!is_utf8(found))
        fail(DLM_INVALID_ARGUMENT, "the decode callback returned text that is not UTF-8");
      return found;
    }
  }

  dlm_decode_fn decode_;
  void* user_;
  std::vector<int32_t> window_;
  size_t told_ = 0;  // number of bytes of window_'s text that were already returned
};

}  // namespace

Decode decode_by_windows(dlm_decode_fn decode, void* user) { return WindowDecoder(decode, user); }

TextWriter::TextWriter(const Denoiser& denoiser, Decode decode, size_t start, bool tells_pieces,
                       std::vector<std::string> stop_strings)
    : denoiser_(denoiser),
      decode_(std::move(decode)),
      tells_pieces_(tells_pieces),
      stop_strings_(std::move(stop_strings)),
      read_(start) {
  for (const std::string& stop : stop_strings_)
    longest_stop_ = std::max(longest_stop_, stop.size());
}

bool TextWriter::read(const Request& request) {
  piece_start_ = text_.size();
  const bool waits = !request.done() && !tells_pieces_ && stop_strings_.empty();
  if (is_stopped_ || waits) return true;
  const std::vector<int32_t>& canvas = request.canvas();
  const std::vector<uint8_t>& undecided = request.undecided();
  size_t end = canvas.size();
  if (!request.done()) {
    end = static_cast<size_t>(std::find(undecided.begin(), undecided.end(), 1) - undecided.begin());
    if (request.edits()) end = std::min(end, static_cast<size_t>(request.view().block_start));
  }
  fresh_.clear();
  int32_t made = 0;
  for (; !is_ended_ && read_ < end; ++read_) {
    const int32_t token = canvas[read_];
    is_ended_ = denoiser_.is_end(token);
    if (is_ended_ || token == denoiser_.mask_token_id) continue;
    fresh_.push_back(token);
    made += request.is_given(read_) ? 0 : 1;
  }
  completion_tokens_ += made;
  decode_(fresh_.data(), fresh_.size(), request.done(), held_);
  give(request.done());
  return !is_stopped_;
}

// Moves text from held_ to text_. If the end of the text may be the start of a stop string, this
// end stays in held_.
void TextWriter::give(bool is_last) {
  // Finds the stop string that ends first in the text. This rule ensures that the result does not
  // depend on how many tokens each call decodes.
  size_t end = std::string::npos, stop_end = std::string::npos;
  for (const std::string& stop : stop_strings_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos || at + stop.size() > stop_end) continue;
    end = at + stop.size() < stop_end ? at : std::min(end, at);
    stop_end = at + stop.size();
  }
  is_stopped_ = end != std::string::npos;
  if (!is_stopped_) {
    const auto starts_stop = [&](size_t at) {
      const std::string_view rest = std::string_view(held_).substr(at);
      return std::any_of(stop_strings_.begin(), stop_strings_.end(), [&](const std::string& stop) {
        return stop.compare(0, rest.size(), rest) == 0;
      });
    };
    end = held_.size();
    if (!is_last)
      for (size_t at = held_.size() - std::min(held_.size(), longest_stop_); at < end; ++at)
        if (starts_stop(at)) end = at;
  }
  text_.append(held_, 0, end);
  held_.erase(0, end);
}

bool TextWriter::is_decided(const Request& request) const {
  const std::vector<uint8_t>& undecided = request.undecided();
  const auto first = std::find(undecided.begin(), undecided.end(), 1);
  if (first == undecided.end()) return true;
  return (is_ended_ || is_stopped_) && read_ <= static_cast<size_t>(first - undecided.begin());
}

}  // namespace dlm
