"""One self-contained HTML file in which every number names the file beside it that it comes from.

    report = Report("Weights of tiny ConvNeXts")
    report.heading("Does the initialiser help?")
    report.text("Accuracy ", Number("bench/results.json", "/summary/1/mean", ".1f", scale=100), " % after 3 epochs.")
    report.figure(axes.figure, "Accuracy against training length.", alt="A line chart ...", source="bench/results.json")
    report.save("report.html")

Numbers are read from their files when the report is saved, so a report cannot say what its files do not; strings are
escaped; pictures are embedded; nothing is fetched, and a content security policy in the page holds browsers to that.
"""

from weightscope.report.building import Report
from weightscope.report.parts import Column, Number, Rows, Sourced
from weightscope.report.words import verdict

__all__ = ["Column", "Number", "Report", "Rows", "Sourced", "verdict"]
