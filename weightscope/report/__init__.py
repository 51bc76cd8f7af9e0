"""Self-contained HTML reports in which every number links to the file it was read from.

    report = Report("Weights of tiny ConvNeXts")
    report.heading("Does the initialiser help?")
    report.text("Accuracy ", Number("bench/results.json", "/summary/1/mean", ".1f", scale=100), " % after 3 epochs.")
    report.figure(axes.figure, "Accuracy against training length.", alt="A line chart ...", source="bench/results.json")
    report.save("report.html")

Numbers are read from their files when the report is saved, so the report always agrees with them. Strings are escaped
and pictures embedded; a content security policy keeps browsers from fetching anything.
"""

from weightscope.report.building import Report
from weightscope.report.parts import Column, Number, Rows, Sourced
from weightscope.report.words import verdict

__all__ = ["Column", "Number", "Report", "Rows", "Sourced", "verdict"]
