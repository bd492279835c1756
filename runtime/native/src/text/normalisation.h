// Normalises Unicode text: to its composed form (NFC, Unicode annex 15), or as BERT does. The code
// uses the tables of a bundle's text file.
#pragma once

#include <string>
#include <string_view>

#include "text/text_file.h"

namespace dlm {

// Writes the composed form of `text` to `out`. If `text` is already composed, returns false and
// does not change `out`. `file` must contain the NFC tables.
bool compose(const TextFile& file, std::string_view text, std::string& out);

// Writes `text` as BERT's normaliser changes it to `out`. `file` must contain WordPiece tables.
void rewrite(const TextFile& file, std::string_view text, std::string& out);

}  // namespace dlm
