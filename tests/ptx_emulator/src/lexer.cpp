#include "lexer.h"

#include <cctype>

#include "errors.h"

namespace ptx_emulator {

static bool starts_word(char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

static bool continues_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

std::vector<Token> tokenize(const std::string& text) {
    std::vector<Token> tokens;
    tokens.reserve(text.size() / 4);
    int line = 1;
    size_t i = 0;
    const size_t n = text.size();
    auto peek = [&](size_t k) { return i + k < n ? text[i + k] : '\0'; };
    while (i < n) {
        const char c = text[i];
        if (c == '\n') {
            ++line;
            ++i;
        } else if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
            ++i;
        } else if (c == '/' && peek(1) == '/') {
            while (i < n && text[i] != '\n') ++i;
        } else if (c == '/' && peek(1) == '*') {
            i += 2;
            while (i < n && !(text[i] == '*' && peek(1) == '/')) line += text[i++] == '\n';
            i += 2;
        } else if (c == '"') {
            const size_t end = text.find('"', i + 1);
            if (end == std::string::npos) raise(Fault::kInvalidPtx, "PTX line %d: unterminated string", line);
            tokens.push_back({Token::Kind::kString, text.substr(i + 1, end - i - 1), line});
            i = end + 1;
        } else if (std::isdigit(static_cast<unsigned char>(c)) ||
                   (c == '.' && std::isdigit(static_cast<unsigned char>(peek(1))))) {
            const size_t begin = i;
            while (i < n && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '.')) ++i;
            tokens.push_back({Token::Kind::kNumber, text.substr(begin, i - begin), line});
        } else if (starts_word(c)) {
            const size_t begin = i++;
            for (;;) {
                if (i < n && continues_word(text[i])) {
                    ++i;
                } else if (i + 2 < n && text[i] == ':' && text[i + 1] == ':' && continues_word(text[i + 2])) {
                    i += 2;  // "shared::cta" is one word
                } else {
                    break;
                }
            }
            tokens.push_back({Token::Kind::kWord, text.substr(begin, i - begin), line});
        } else if (std::string("{}[]()<>,;:|!@+-=*~").find(c) != std::string::npos) {
            tokens.push_back({Token::Kind::kPunctuation, std::string(1, c), line});
            ++i;
        } else {
            raise(Fault::kInvalidPtx, "PTX line %d: unexpected character '%c'", line, c);
        }
    }
    tokens.push_back({Token::Kind::kEnd, "", line});
    return tokens;
}

}  // namespace ptx_emulator
