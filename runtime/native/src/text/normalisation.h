// Normalises Unicode text to its composed form (NFC, Unicode annex 15), with the tables of a text
// file.
#pragma once

#include <string>
#include <string_view>

#include "text/text_file.h"

namespace dlm {

// Writes the composed form of `text` to `out`. Returns false if `text` is already composed; `out`
// is then not used. `file` must have the NFC tables.
bool compose(const TextFile& file, std::string_view text, std::string& out);

}  // namespace dlm
