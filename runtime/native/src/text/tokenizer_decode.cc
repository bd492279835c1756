#include "base/utf8.h"
#include "text/tokenizer.h"

namespace dlm {

void TextDecoder::operator()(const int32_t* ids, size_t count, bool is_last, std::string& out) {
  const TextFile& file = text_->file();
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= file.vocab_size) continue;
    const auto token = static_cast<size_t>(ids[i]);
    if ((file.token_flags[token] & TextFile::special) != 0) continue;
    if (file.has_word_pieces) {
      if (is_at_start_ && (file.token_flags[token] & TextFile::continues) != 0) out += kContinues;
      put(file.tokens[token], out);
      is_at_start_ = false;
      continue;
    }
    if (!file.is_byte_fallback || (file.token_flags[token] & TextFile::byte) != 0) {
      held_ += file.tokens[token];
      continue;
    }
    if (file.tokens[token].empty()) continue;
    end_bytes(out);
    put(file.tokens[token], out);
  }
  if (file.is_byte_fallback) {
    // Adjacent byte tokens are decoded together. So this function decodes the bytes in held_ only
    // when no more bytes can follow them.
    if (is_last) end_bytes(out);
    return;
  }
  size_t at = 0;
  while (at < held_.size()) {
    const std::string_view rest = std::string_view(held_).substr(at);
    const Utf8Start start = utf8_start(rest);
    if (start.kind == Utf8Start::cut && !is_last) break;
    put(start.kind == Utf8Start::whole ? rest.substr(0, start.bytes) : kReplacement, out);
    at += start.bytes;
  }
  held_.erase(0, at);
}

void TextDecoder::end_bytes(std::string& out) {
  if (is_utf8(held_))
    put(held_, out);
  else
    for (size_t i = 0; i < held_.size(); ++i) put(kReplacement, out);
  held_.clear();
}

void TextDecoder::put(std::string_view whole, std::string& out) {
  if (whole.empty()) return;
  if (is_at_start_ && text_->file().strips_space && whole.front() == ' ') whole.remove_prefix(1);
  is_at_start_ = false;
  out += whole;
}

}  // namespace dlm
