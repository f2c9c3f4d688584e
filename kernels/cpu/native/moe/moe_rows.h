// Rows of x as the linears of experts multiply them: gathered, padded and quantized.
//
// Each kind has the products of gemm.h, gemm_amx.h and quant_gemm.h, so a row's bits are those of the linear alone. The rows
// of an expert begin at a multiple of ALIGN. A row may be filled in parts, by several threads.
#pragma once

#include "linear/gemm_amx.h"
#include "quantized/quant_gemm.h"

namespace llmbox {

// Words as linears read them.
template <class E> class WordCopies {
public:
    using In = typename E::Element;
    using Shape = Linear;
    static constexpr int ALIGN = 1;

    static size_t bytes(int rows, const Linear& linear) {
        return static_cast<size_t>(rows) * linear.words * E::PACK * sizeof(RowNumber);
    }
    WordCopies(uint8_t* memory, int, const Linear& linear)
        : data_(reinterpret_cast<RowNumber*>(memory)), words_(linear.words) {}

    static int parts(const Linear&) { return 1; }
    static int part_size(const Linear& linear) { return linear.inputs; }
    void fill_part(int row, int, const In* from, int inputs) const { fill(row, from, inputs); }
    void fill(int row, const In* from, int inputs) const { pad_row(from, inputs, data_ + width() * row, width()); }
    void multiply(const Linear& linear, int panel, int row, int rows, float* tile, Member&) const {
        const WordRows<E> x{data_, width()};
        multiply_panel<E>(linear.panel(panel), words_, x.from(row, 0), rows, tile);
    }

private:
    using RowNumber = typename E::RowNumber;
    size_t width() const { return static_cast<size_t>(words_) * E::PACK; }

    RowNumber* data_;
    int words_;
};

// Rounded to int8.
template <class T> class RoundedCopies {
public:
    using In = T;
    using Shape = QuantLinear;
    static constexpr int ALIGN = QuantRows::BLOCK;

    static size_t bytes(int rows, const QuantLinear& linear) { return QuantRows::bytes(rows, linear); }
    RoundedCopies(uint8_t* memory, int rows, const QuantLinear& linear) : rows_(memory, rows, linear) {}  // not ordered

    static int parts(const QuantLinear& linear) { return linear.groups; }
    static int part_size(const QuantLinear& linear) { return linear.group; }
    void fill_part(int row, int part, const In* from, int inputs) const {
        const int begin = part * rows_.group;
        quantize_group(from + begin, std::min(rows_.group, inputs - begin), rows_.cell(row, part), rows_);
    }
    void multiply(const QuantLinear& linear, int panel, int row, int rows, float* tile, Member& member) const {
        multiply_quant_panel(linear, panel, rows_, row, rows, tile, member);
    }

private:
    QuantRows rows_;
};

template <class E> struct PlainCopies {
    using Rows = WordCopies<E>;
};

#if LLMBOX_TILES

// As tiles, [16 rows][16 words].
class TileCopies {
public:
    using In = bf16;
    using Shape = Linear;
    static constexpr int ALIGN = TILE_ROWS;

    static size_t bytes(int rows, const Linear& linear) { return packed_room(rows, linear.words); }
    TileCopies(uint8_t* memory, int, const Linear& linear) : data_(memory), words_(linear.words) {}

    static int parts(const Linear&) { return 1; }
    static int part_size(const Linear& linear) { return linear.inputs; }
    void fill_part(int row, int, const bf16* from, int inputs) const { fill(row, from, inputs); }
    void fill(int row, const bf16* from, int inputs) const { pack_row(from, inputs, row, data_, words_); }
    void multiply(const Linear& linear, int panel, int row, int rows, float* tile, Member& member) const {
        const auto x = RowTiles::packed(data_, words_).from(row, 0);
        multiply_panel(member.tiles, linear.panel(panel), words_, x, rows, tile);
    }

private:
    uint8_t* data_;
    int words_;
};

template <> struct PlainCopies<BF16> {
    using Rows = TileCopies;
};

#endif

}  // namespace llmbox
